"""Trees instead of chains: how many siblings to propose at each depth, priced like everything else.

A tree of widths w_1 .. w_K has one spine, the draft's chain of first-ranked tokens, and at depth j the w_j first-ranked continuations of
the spine; only the first of them goes on. Siblings come from the forward that the spine needs anyway, so a tree of depth K costs a draft K
forwards like a chain of length K, and sum w_j verified tokens. With hazard c_jr, the chance that rank r at depth j is accepted given that
the spine was up to there and the ranks before r were not, and s_j = c_11 .. c_j1, a step emits

    E = 1 + sum_j s_{j-1} (1 - prod_{r <= w_j} (1 - c_jr))

tokens (Medusa's widths by head, arXiv 2401.10774, on a spine). Widths are fixed before this step's tokens are sampled; the siblings are
then tested by the multi-draft rule, none of them merged when they were drawn (see ``policy.merging``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, StepProblem, forward_tokens
from .plan import BoolArray, FloatArray, IntArray


class TreeCosts(NamedTuple):
    """What a step with trees of one draft takes, in seconds.

    ``verify_s[m]`` of a step with m proposed tokens in all and no drafting, staircases allowed, inf where there is no room for so many; no
    larger total is considered. ``depth_s[K]`` of the draft's forward at each depth, for all rows. ``speculation_s`` once if any row does.
    """

    verify_s: FloatArray
    depth_s: FloatArray
    speculation_s: float = 0.0

    @classmethod
    def of(cls, problem: StepProblem, draft: int) -> TreeCosts:
        """Return the costs of a step whose rows all use one draft; those that do not speculate, or not as deep, are charged as if they did.

        A batch of one is charged exactly what the planner charges it; for more rows, ``problem.verify_s`` bounds the total to n K nodes.
        """
        tokens = np.full(problem.gain.shape[1::-1], problem.rows)
        tokens[:, :1] = problem.first_tokens.sum(1)[:, None]
        depth_s = problem.added_s(tokens)[draft] + float(problem.row_s[draft].sum())
        depth_s[:1] += float(problem.charge_s[draft].sum())
        return cls(problem.verify_s, depth_s, problem.speculation_s)

    @classmethod
    def of_chains(cls, problem: StepProblem, choice: Choice) -> TreeCosts:
        """Return the costs of a step whose rows have the chains of a choice, or shorter ones, which are charged as if they were whole."""
        used = choice.length.nonzero()[0]
        draft, alive = choice.draft[used], np.arange(len(problem.gain))[:, None] < choice.length[used]
        depth_s = problem.added_s(forward_tokens(problem, [choice])).sum(0) + alive @ problem.row_s[draft, used]
        depth_s[:1] += float(problem.charge_s[draft, used].sum())
        return cls(problem.verify_s, depth_s, problem.speculation_s)


class TreeDecision(NamedTuple):
    """``widths`` int64[n, K] (all 0: no speculation; at most 1: a chain), expected weighted tokens and seconds."""

    widths: IntArray
    value: float
    step_s: float


def rank_chances(hazard: FloatArray) -> FloatArray:
    """Return the chance that each rank is the one accepted, float64[..., W], from the ranks' hazards in turn."""
    missed = np.cumprod(1.0 - hazard, axis=-1)
    chances = hazard.copy()
    chances[..., 1:] *= missed[..., :-1]
    return chances


def tree_tokens(hazard: FloatArray, widths: IntArray) -> FloatArray:
    """Return the expected emitted tokens, float64[...], of trees of widths int64[..., K] at hazards float64[..., K, W].

    Widths above 0 come first: a depth of width 0 ends the tree.
    """
    inside = np.arange(hazard.shape[-1]) < widths[..., None]
    spine = np.cumprod(hazard[..., 0], axis=-1)
    reached = np.concatenate([np.ones_like(spine[..., :1]), spine[..., :-1]], axis=-1)
    tokens: FloatArray = 1.0 + ((rank_chances(hazard) * inside).sum(-1) * reached).sum(-1)
    return tokens


def best_trees(
    hazard: FloatArray,
    weight: FloatArray,
    ceiling: IntArray,
    price: float,
    costs: TreeCosts,
    node_ceiling: IntArray | None = None,
) -> TreeDecision:
    """Return the widths of n rows of one draft that maximise sum_i w_i E_i - price * seconds (price: tokens per second).

    ``hazard`` float64[n, K, W]; ``weight[n]``; ``ceiling[n]`` the greatest depth of a row (at most what it may still emit, less one) and
    ``node_ceiling[n]`` (None: none) the most tokens that it may propose. Exact where no rank is accepted more often than the one before
    it: then no node is worth more than one that it needs, so that for a given depth the best trees of m nodes are the m nodes of most
    worth, and one cumulative sum scores every m on the staircase (as Sequoia, arXiv 2402.12374, for trees of constant hazards). Draws from
    one law are always so ordered (the residual's overlap with q only falls); estimates that are not count as much as the rank before, so
    the result is never worse than the best chains.
    """
    n, k_max, _ = hazard.shape
    if not n or not k_max:
        nothing = np.zeros((n, k_max), np.int64)
        return TreeDecision(nothing, float(weight.sum()), float(costs.verify_s[0]))
    worth = node_worth(hazard, weight) * (np.arange(k_max) < ceiling[:, None])[:, :, None]
    room = np.full(n, worth[0].size) if node_ceiling is None else node_ceiling
    trees = best_nodes(worth, room, price, costs)
    widths: IntArray = trees.chosen.sum(2)
    return TreeDecision(widths, float(weight @ tree_tokens(hazard, widths)), trees.step_s)


def node_worth(hazard: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the expected weighted tokens that each node adds, float64[n, K, W], never more than that of a node before it."""
    spine = np.cumprod(hazard[:, :, 0], axis=1) * weight[:, None]
    reached = np.concatenate([weight[:, None], spine[:, :-1]], axis=1)
    worth = rank_chances(hazard) * reached[:, :, None]
    worth[:, :, 0] = spine  # as it is rounded in ``reached``
    ordered: FloatArray = np.minimum.accumulate(worth, axis=2)
    return ordered


class Nodes(NamedTuple):
    """Chosen nodes bool[n, K, W], what they add at the price, less that of the whole step, and its seconds."""

    chosen: BoolArray
    objective: float
    step_s: float


def best_nodes(worth: FloatArray, room: IntArray, price: float, costs: TreeCosts) -> Nodes:
    """Return the nodes of the best objective (without the bonus tokens), the least of those that are as good; ``worth[n, K, W]`` never
    rises with depth or rank, ``room[n]`` bounds a row's nodes.
    """
    last, plain_s = int(np.isfinite(costs.verify_s).sum()) - 1, float(costs.verify_s[0])
    order = np.argsort(-worth, axis=None, kind="stable")
    open_to = _eligible(worth, room)[:, order]  # [depth of the trees, nodes]
    count = np.cumsum(open_to, axis=1)
    seconds = costs.verify_s[np.minimum(count, last)] + (costs.speculation_s + np.cumsum(costs.depth_s))[:, None]
    objective = np.where(count <= last, np.cumsum(worth.ravel()[order] * open_to, axis=1) - price * seconds, -np.inf)
    best = Nodes(np.zeros(worth.shape, np.bool_), -price * plain_s, plain_s)
    for depth, m in enumerate(objective.argmax(1).tolist()):
        found = float(objective[depth, m])
        if count[depth, m] and found > best.objective + TIE * (1.0 + abs(best.objective)):
            chosen = np.zeros(worth.shape, np.bool_)
            chosen.reshape(-1)[order[: m + 1][open_to[depth, : m + 1]]] = True
            best = Nodes(chosen, found, float(seconds[depth, m]))
    return best


def _eligible(worth: FloatArray, room: IntArray) -> BoolArray:
    """Return whether trees of depth 1 .. K may have a node, bool[K, n K W]: it is not too deep, and among its row's ``room[n]`` best."""
    n, k_max, ranks = worth.shape
    rows = worth.reshape(n, -1)
    order = np.argsort(-rows, axis=1, kind="stable")
    inside = order // ranks <= np.arange(k_max)[:, None, None]
    eligible = np.empty_like(inside)
    np.put_along_axis(eligible, np.broadcast_to(order, inside.shape), inside & (np.cumsum(inside, axis=2) <= room[:, None]), axis=2)
    return eligible.reshape(k_max, -1)
