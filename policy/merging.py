"""Several drafts' chains verified as one tree: what it emits, when it pays, and which tokens may share a node.

Chains branch at the root and are tested in order: chain i + 1 is looked at where the first token of chain i was rejected. With hazards
c_ij, the chance of position j of chain i given that it was reached (so c_i1 is given that the first tokens of all chains before were
rejected), a step emits

    E = 1 + sum_i prod_{i' < i} (1 - c_i'1) sum_{j <= k_i} c_i1 .. c_ij

tokens by the multi-step rule of SpecInfer (arXiv 2305.09781). Where point-mass chains share tokens the tree emits at least that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .goodput import TIE
from .plan import FloatArray, IntArray


class MergeDecision(NamedTuple):
    """Lengths of the first and the second draft's chain (both above 0: merged), expected tokens (weighted), seconds, and why."""

    lengths: tuple[int, int]
    value: float
    step_s: float
    reason: str


class Tree(NamedTuple):
    """A tree to verify: ``token[m]``, and ``parent[m]`` the node that it continues (-1: the sequence itself), parents first."""

    token: IntArray
    parent: IntArray


def merged_tokens(chains: Sequence[FloatArray]) -> float:
    """Return the expected emitted tokens of chains with the given hazards (float64[k_i] each), in the order of their test."""
    tokens, missed = 1.0, 1.0
    for hazard in chains:
        if len(hazard):
            tokens += missed * float(np.cumprod(hazard).sum())
            missed *= 1.0 - float(hazard[0])
    return tokens


def best_merge(
    first: FloatArray,
    second: FloatArray,
    rescue: FloatArray,
    drafting_s: tuple[FloatArray, FloatArray],
    verify_s: FloatArray,
    price: float,
    weight: float = 1.0,
) -> MergeDecision:
    """Return the best of no speculation, either chain alone, and both merged, for one request; exact, by looking at every pair of lengths.

    ``first`` and ``second`` are hazards float64[K] of the drafts alone; ``rescue`` float64[K] those of the second where the first token of
    the first was rejected, as counterfactual scores of both drafts on the same tokens tell: usually well below ``second``, for a hard token
    is hard for both. ``drafting_s`` float64[K + 1] each: seconds of drafting 0..K tokens. ``verify_s[m]``: seconds of the step with m
    proposed tokens, inf where there is no room; more than it has are not considered.
    """
    one, two = np.arange(len(first) + 1), np.arange(len(second) + 1)
    alone = [np.concatenate([[0.0], np.cumsum(np.cumprod(hazard))]) for hazard in (first, second, rescue)]
    miss = 1.0 - first[0] if len(first) else 1.0
    value = weight * (1.0 + alone[0][:, None] + miss * alone[2][: len(two)])
    value[0] = weight * (1.0 + alone[1])
    tokens, last = one[:, None] + two, int(np.isfinite(verify_s).sum()) - 1
    seconds = verify_s[np.minimum(tokens, last)] + drafting_s[0][: len(one), None] + drafting_s[1][: len(two)]
    objective = np.where(tokens <= last, value - price * seconds, -np.inf)
    best = objective.max()
    as_good = np.argwhere(objective >= best - TIE * (1.0 + abs(best)))
    k, j = min(as_good.tolist(), key=lambda pair: (sum(pair), pair))
    single = max(objective[0].max(), objective[:, 0].max())
    reason = _reason(k, j, float(best - objective[0, 0]), float(objective[1:, 1:].max(initial=-np.inf) - single))
    return MergeDecision((k, j), float(value[k, j]), float(seconds[k, j]), reason)


def _reason(first: int, second: int, over_none: float, over_single: float) -> str:
    """Say what was chosen, and what merging gains or loses against the best chain alone, in tokens at the price of time."""
    if first and second:
        return f"merged {first}+{second} tokens: {over_none:+.3f} tokens over none, {over_single:+.3f} over the best chain alone"
    why = f"the best merged pair {over_single:+.3f} tokens against it" if over_single > -np.inf else "nothing to merge"
    return f"one chain of {first or second}: {over_none:+.3f} tokens over none; {why}" if first or second else f"no speculation; {why}"


def merge(proposals: Sequence[Sequence[int]], drawn: Sequence[bool]) -> Tree:
    """Return the proposals as one tree, in their order.

    ``drawn[i]``: chain i was drawn from a law and is judged by it (rejection sampling). Its tokens have nodes of their own even where
    another chain has the same: each draw is tested against the law that is left by the ones before, and to drop a second draw because
    it equals the first would change the law of what is emitted. Point-mass chains (greedy, lookup, plan-invariant) share equal prefixes:
    a token once rejected has no mass left, so its second test could only fail.
    """
    tokens: list[int] = []
    parents: list[int] = []
    shared: dict[tuple[int, int], int] = {}
    for proposal, own in zip(proposals, drawn, strict=True):
        node = -1
        for token in proposal:
            twin = None if own else shared.get((node, token))
            if twin is None:
                tokens.append(token)
                parents.append(node)
                twin = len(tokens) - 1
            if not own:
                shared[node, token] = twin
            node = twin
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64))
