"""What is accepted of a text's own tokens, by rule, and the trees that hold them.

Laws p (the target's) and q (a draft's) are [n, vocab], ``tokens`` [n, 1] what was drawn from p.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

MOST = 8
"""Nodes of the largest tree."""


def race_chance(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the chance that q's race has the same winner, given that ``tokens`` won p's."""
    own_p, own_q = p.gather(1, tokens), q.gather(1, tokens)
    return (own_q / torch.maximum(p * own_q, q * own_p).sum(-1, keepdim=True))[:, 0].nan_to_num_(0)


def rejection_ranks(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the chance [n, MOST] that each of q's independent candidates is the one accepted."""
    law, left, found = p.double(), torch.ones(len(p), 1, dtype=torch.float64), []
    own, q = p.gather(1, tokens).double(), q.double()
    for _ in range(MOST):
        both = torch.minimum(law, q)
        found.append((left * both.gather(1, tokens) / own).nan_to_num_(0))
        left = left * (1 - both.sum(-1, keepdim=True)).clamp_(min=0)
        law = (law - q).clamp_(min=0)
        law /= law.sum(-1, keepdim=True).clamp_(min=1e-30)
    return torch.cat(found, 1)


def hindsight(p: torch.Tensor, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the race's exponentials [n, vocab], drawn given that ``tokens`` won it."""
    first = torch.empty(len(p), 1).exponential_(generator=generator)
    after = torch.empty_like(p).exponential_(generator=generator)
    return (p * first + after).scatter_(1, tokens, p.gather(1, tokens) * first)


def race_ranks(speeds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return which [n, MOST] of q's first finishers the tokens are, from q / E [n, vocab]."""
    own = speeds.gather(1, tokens)
    rank = (speeds > own).sum(-1, keepdim=True)
    return ((rank == torch.arange(MOST)) & (own > 0)).double()


def chain(chances: torch.Tensor, length: int) -> torch.Tensor:
    """Return the accepted tokens [n - MOST + 1] of a chain from each place on."""
    return chances.double().unfold(0, MOST, 1)[:, :length].cumprod(-1).sum(-1)


def fixed(spine: torch.Tensor, ranks: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """Return the accepted tokens [n - MOST + 1] of a tree with ``widths`` candidates by depth."""
    places = len(spine) - MOST + 1
    total, reached = torch.zeros(places), torch.ones(places)
    for depth, width in enumerate(widths):
        at = slice(depth, depth + places)
        total = total + reached * ranks[at, :width].sum(-1)
        reached = reached * spine[at]
    return total


def grow(
    first: torch.Tensor,
    behind: Callable[[list[int], list[int]], torch.Tensor],
) -> tuple[list[int], list[int]]:
    """Return tokens and parents of the best MOST nodes (or all) by the product of confidences.

    ``first`` are the confidences [vocab] behind the text, ``behind`` those behind the last node.
    """
    tokens: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int]] = []
    confidences, path, parent = first, 1.0, -1
    while True:
        best = confidences.topk(MOST)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if value > 0:
                heapq.heappush(waiting, (-path * value, parent, token))
        if not waiting:
            return tokens, parents
        cost, above, token = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(above)
        if len(tokens) == MOST:
            return tokens, parents
        path, parent = -cost, len(tokens) - 1
        confidences = behind(tokens, parents)


def followed(tokens: list[int], parents: list[int], text: list[int], nodes: int) -> int:
    """Return how many of a text's next tokens the first ``nodes`` nodes hold as a path."""
    children = {(parents[n], tokens[n]): n for n in range(min(nodes, len(tokens)))}
    at, depth = -1, 0
    while (at := children.get((at, text[depth]), -2)) >= 0:
        depth += 1
        if depth == len(text):
            break
    return depth
