"""What trees or merged chains would make of a batch whose chains are chosen: the best of each, or why it does not pay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, Score, StepProblem, forward_tokens, shaped_seconds
from .merging import second_worth
from .plan import NO_DRAFT, FloatArray, IntArray
from .shapes import NO_SPECULATION, ONE_DRAFT, does_not_pay
from .trees import TreeCosts, best_nodes, best_trees, node_worth, tree_tokens


class Basis(NamedTuple):
    """What offers are made from: the problem, its rows' weights and hazards [n, D, K], the chains chosen, their score and the price of
    time.

    ``most_nodes`` bounds a row's proposed tokens; a ``probing`` batch keeps its drafts.
    """

    problem: StepProblem
    weight: FloatArray
    hazard: FloatArray
    chains: Choice
    score: Score
    price: float
    most_nodes: int
    probing: bool


class Offer(NamedTuple):
    """First chains (of trees: the spines) with widths [n, K] or second chains, their score, and the expected tokens, unweighted."""

    first: Choice
    width: IntArray | None
    second: Choice | None
    result: Score
    tokens: float


def tree_offer(basis: Basis, siblings: FloatArray) -> tuple[Offer | None, str]:
    """Return the best trees of the rows' own drafts or of one draft for all; ``siblings[n, D, K, W - 1]`` hazards from rank 2 on."""
    problem, n, k_max = basis.problem, len(basis.weight), len(basis.problem.gain)
    hazard = np.concatenate([basis.hazard[:, :, :k_max, None], siblings[:, :, :k_max]], axis=3)
    options = [(np.maximum(basis.chains.draft, 0), basis.chains.length, TreeCosts.of_chains(problem, basis.chains))]
    if not basis.probing:
        every = [d for d, ceiling in enumerate(problem.ceiling) if ceiling.any() and (problem.limit is None or problem.limit[d] >= n)]
        options += [(np.full(n, d), problem.ceiling[d], TreeCosts.of(problem, d)) for d in every]
    best: Offer | None = None
    for draft, ceiling, costs in options:
        own = hazard[np.arange(n), draft]
        width = best_trees(own, basis.weight, ceiling, basis.price, costs, np.full(n, basis.most_nodes)).widths
        if width.max() <= 1:
            continue
        depth, emitted = (width > 0).sum(1), tree_tokens(own, width)
        first = Choice(np.where(depth > 0, draft, NO_DRAFT), depth)
        result = Score(float(basis.weight @ emitted), *shaped_seconds(problem, [first], int(width.sum())))
        if _better(result, basis, best):
            best = Offer(first, width, None, result, float(emitted.sum()))
    return best, "" if best else _why_no_sibling(basis, hazard)


def _why_no_sibling(basis: Basis, hazard: FloatArray) -> str:
    """Return what the best sibling of the chosen chains would bring over its cost."""
    (draft, length), m = basis.chains, int(basis.chains.length.sum())
    if not m:
        return NO_SPECULATION
    worth = node_worth(hazard[np.arange(len(length)), np.maximum(draft, 0)], basis.weight)[:, :, 1]
    best = float((worth * (np.arange(worth.shape[1]) < length[:, None])).max())
    return _ratio(best, basis.price * float(basis.problem.verify_s[m + 1] - basis.problem.verify_s[m]))


def merge_offer(basis: Basis, rescues: FloatArray) -> tuple[Offer | None, str]:
    """Return the best second chains, of one draft, beside the chosen ones; ``rescues[n, first, second]`` the chance of a second chain's
    first token where the first chain's was rejected.
    """
    (draft, length), problem = basis.chains, basis.problem
    if len(problem.ceiling) < 2 or not length.any():
        return None, ONE_DRAFT if len(problem.ceiling) < 2 else NO_SPECULATION
    best, why, row = None, "", np.arange(len(length))
    first = basis.hazard[row, np.maximum(draft, 0), 0]
    closest = 0.0
    for d, ceiling in enumerate(problem.ceiling):
        room = np.where((length > 0) & (draft != d), np.minimum(ceiling, basis.most_nodes - length), 0)
        users = int((room > 0).sum())
        if not users or (problem.limit is not None and users + int((draft == d).sum()) > problem.limit[d]):
            continue
        worth = second_worth(first, rescues[row, np.maximum(draft, 0), d], basis.hazard[:, d, : len(problem.gain)], basis.weight)
        worth[np.arange(worth.shape[1]) >= room[:, None]] = 0.0
        second = _seconds(basis, d, worth, room)
        one = Choice(np.where(room > 0, d, NO_DRAFT), np.minimum(room, 1))
        cost_s = shaped_seconds(problem, [basis.chains, one], int(length.sum()) + users)[0] - basis.score.charged_s
        closest = max(closest, float(worth[:, 0].sum()) / max(basis.price * cost_s, TIE))
        added = worth * (np.arange(worth.shape[1]) < second.length[:, None])
        proposed = int(length.sum() + second.length.sum())
        result = Score(basis.score.value + float(added.sum()), *shaped_seconds(problem, [basis.chains, second], proposed))
        if second.length.any() and _better(result, basis, best):
            tokens = float((_emitted(basis) + (added.sum(1) / np.maximum(basis.weight, TIE))).sum())
            best = Offer(basis.chains, None, second, result, tokens)
    if best is None:
        why = does_not_pay(closest)
    return best, why


def _seconds(basis: Basis, draft: int, worth: FloatArray, room: IntArray) -> Choice:
    """Return the second chains of a draft that add most at the price, all rows with room being charged for its forwards."""
    problem, m = basis.problem, int(basis.chains.length.sum())
    before = forward_tokens(problem, [basis.chains])
    whole = forward_tokens(problem, [basis.chains, Choice(np.where(room > 0, draft, NO_DRAFT), room)])
    users = room > 0
    depth_s = problem.added_s(whole)[draft] - problem.added_s(before)[draft] + float(problem.row_s[draft, users].sum())
    depth_s[0] += float(problem.charge_s[draft, users].sum())
    nodes = best_nodes(worth[:, :, None], room, basis.price, TreeCosts(problem.verify_s[m:], depth_s))
    length: IntArray = nodes.chosen.sum((1, 2))
    return Choice(np.where(length > 0, draft, NO_DRAFT), length)


def _emitted(basis: Basis) -> FloatArray:
    """Return the expected tokens of the chosen chains by row."""
    survival = np.cumprod(basis.hazard[np.arange(len(basis.weight)), np.maximum(basis.chains.draft, 0)], axis=1)
    tokens: FloatArray = 1.0 + (survival * (np.arange(survival.shape[1]) < basis.chains.length[:, None])).sum(1)
    return tokens


def _better(result: Score, basis: Basis, best: Offer | None) -> bool:
    """Return whether a score is allowed and beats the chains and the best so far."""
    enough = max(score.objective(basis.price) for score in (basis.score, *([best.result] if best else [])))
    return result.step_s <= basis.problem.limit_s and result.objective(basis.price) > enough + TIE * (1.0 + abs(enough))


def _ratio(gain: float, cost: float) -> str:
    return does_not_pay(gain / cost if cost > 0 else 0.0)
