"""Which nodes the target verifies, once the drafts have proposed, and what their claims are worth.

What drafting took is spent. A node is worth the chance that its path is what the target draws: one
more token of its row. Its verification, and reading what comes before it, cost time at the plan's
price. Over the whole batch the nodes worth most are verified, as many as leave the most: every
total is looked at, for a step of the staircase may lose what the next nodes bring. Where a pass is
quicker behind one of as many tokens, that total is often the best.

The chance is the draft's own confidence, calibrated (``Calibration``). A node may teach only if its
fate is known whatever the target drew, its parent being the text or verified: of deeper nodes only
failures are seen, and a draft that is cut short once would be believed less and less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .latency import Times
from .loops import trim as loops
from .loops.search import TIE
from .plan import BoolArray, Drafted, FloatArray, IntArray, Plan, StepRows, View
from .problem import Choice, StepProblem
from .tenants import with_rows

EDGES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98],
)
"""Of the bins of confidence, finer towards 0 and 1; each bin holds its lower edge."""

BINS = len(EDGES) + 1
COUNTS = ("nodes", "claimed", "held")
_BOUNDS = np.concatenate([[0.0], EDGES, [1.0]])
_MIDDLE = (_BOUNDS[:-1] + _BOUNDS[1:]) / 2
_PRIOR_NODES = 8.0  # that a bin's claim counts for
_MEMORY_NODES = 20_000.0  # of a draft, greedy or sampled: a few thousand steps of a row
_APART = 2.0  # from one map to the next: all lie on one axis, for one look-up


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What confidences are worth, by draft and apart for greedy and sampled (``drawn``) rows.

    Of several ``tenants`` a draft has a column for each (``policy.tenants``). Fading counts by bin,
    float64[columns, 2, BINS] each: ``nodes``, the sum ``claimed`` of their
    confidences, and how many ``held``. The map is linear between the bins' means, each shrunk
    towards the claim itself; it never falls, so that a row's best-first order stays. The maps lie
    one behind the other: ``held_at`` at confidence ``knots``.
    """

    nodes: FloatArray
    claimed: FloatArray
    held: FloatArray
    knots: FloatArray
    held_at: FloatArray

    @classmethod
    def of(cls, nodes: FloatArray, claimed: FloatArray, held: FloatArray) -> Calibration:
        """Return the calibration with these counts."""
        weight = nodes + _PRIOR_NODES
        mean = (claimed + _PRIOR_NODES * _MIDDLE) / weight
        share = _rising((held + _PRIOR_NODES * _MIDDLE) / weight, weight)
        knots, held_at = np.zeros((2, *nodes.shape[:2], BINS + 2))
        knots[..., 1:-1], held_at[..., 1:-1] = mean, share
        knots[..., -1] = 1.0
        held_at[..., -1] = np.minimum(share[..., -1] / mean[..., -1], 1.0)
        knots += _APART * np.arange(knots[..., 0].size).reshape(*nodes.shape[:2], 1)
        return cls(nodes, claimed, held, knots.ravel(), held_at.ravel())

    @classmethod
    def none(cls, drafts: int) -> Calibration:
        """Return what is known before any node: every claim is believed."""
        zero = np.zeros((drafts, 2, BINS))
        return cls.of(zero, zero, zero)

    def with_tenants(self, before: int, tenants: int, emptied: list[int]) -> Calibration:
        """Return the calibration of ``before`` tenants for so many; nothing is known of ``emptied``
        rows.
        """
        nodes, claimed, held = (
            with_rows(column, before, tenants, emptied)
            for column in (self.nodes, self.claimed, self.held)
        )
        return self.of(nodes, claimed, held)

    @staticmethod
    def claims(nodes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the least and the most that so many nodes can claim, float64[..., BINS] each."""
        return nodes * _BOUNDS[:-1], nodes * _BOUNDS[1:]

    @staticmethod
    def bins(confidence: FloatArray) -> IntArray:
        """Return the bins of confidences, int64[q]."""
        return EDGES.searchsorted(confidence, side="right")

    def probability(self, draft: IntArray, drawn: BoolArray, confidence: FloatArray) -> FloatArray:
        """Return how likely the target draws the paths to nodes (as in ``Drafted``, but ``draft``
        is the column of tenant and draft), [q] each.
        """
        place = confidence + _APART * (2 * draft + drawn)
        likely: FloatArray = np.interp(place, self.knots, self.held_at)
        return likely

    def learnt(
        self, draft: IntArray, drawn: BoolArray, confidence: FloatArray, held: BoolArray
    ) -> Calibration:
        """Return the calibration after nodes, by column as ``draft``, whose fate would be known
        whatever it is, [q] each.
        """
        if not len(draft):
            return self
        place = (2 * draft + drawn) * BINS + self.bins(confidence)
        size, shape = self.nodes.size, self.nodes.shape
        new = np.bincount(place, minlength=size).reshape(shape)
        claimed = np.bincount(place, confidence, size).reshape(shape)
        true = np.bincount(place, held, size).reshape(shape)
        keep = np.exp(new.sum(2, keepdims=True) / -_MEMORY_NODES)
        return self.of(
            keep * self.nodes + new,
            keep * self.claimed + claimed,
            keep * self.held + true,
        )


class Promise(NamedTuple):
    """What a plan expects of rows, by rising ``request`` int64[n] with their ``draft`` and
    ``column`` of tenant and draft: ``accepted`` float64[K + 1, n] tokens of so many that are
    verified.
    """

    request: IntArray
    draft: IntArray
    column: IntArray
    accepted: FloatArray

    @classmethod
    def of(
        cls,
        problem: StepProblem,
        choice: Choice,
        request: IntArray,
        tenant: IntArray,
        held_share: FloatArray,
    ) -> Promise | None:
        """Return that of a choice for requests of these tenants' rows; the problem's gains are
        times ``held_share`` float64[columns].
        """
        used = choice.length.nonzero()[0]
        if not len(used):
            return None
        draft = choice.draft[used]
        column = tenant[used] * problem.gain.shape[1] + draft
        accepted = problem.value[:, draft, used] / held_share[column]
        accepted = np.concatenate([np.zeros((1, len(used))), accepted])
        return cls(request[used], draft, column, accepted)

    def held(self, rows: StepRows, columns: int) -> FloatArray:
        """Return the verified nodes that held, and what was expected, float64[2, columns]; 0 where
        the trim cut off nothing of a column.
        """
        place = np.minimum(self.request.searchsorted(rows.request), len(self.request) - 1)
        same = (self.request[place] == rows.request) & (self.draft[place] == rows.draft)
        place, cut = place[same], rows.verified < rows.length
        column = self.column[place]
        length = np.minimum(rows.length[same], len(self.accepted) - 1)  # of a plan before, more
        held = np.bincount(column, rows.followed[same], columns)
        expected = np.bincount(column, self.accepted[length, place], columns)
        some_cut = np.bincount(column, cut[same], columns) > 0
        counts: FloatArray = np.where(some_cut, [held, expected], 0.0)
        return counts


def _rising(share: FloatArray, weight: FloatArray) -> FloatArray:
    """Return shares made to rise along the last axis, in place: nearest in weighted squares.

    Neighbours that fall are pooled (pool adjacent violators, Ayer et al. 1955).
    """
    for place in zip(*(share[..., 1:] < share[..., :-1]).any(-1).nonzero(), strict=True):
        pools: list[tuple[float, float, int]] = []  # mean, weight, bins
        for pool in zip(share[place].tolist(), weight[place].tolist(), [1] * BINS, strict=True):
            mean, mass, bins = pool
            while pools and pools[-1][0] >= mean:
                before, more, others = pools.pop()
                mean = (before * more + mean * mass) / (more + mass)
                mass, bins = mass + more, bins + others
            pools.append((mean, mass, bins))
        share[place] = [mean for mean, _, bins in pools for _ in range(bins)]
    return share


def trimmed(
    times: Times,
    calibration: Calibration,
    view: View,
    plan: Plan,
    drafted: Drafted,
) -> IntArray:
    """Return how many of each row's nodes are verified, int64[n]; view and plan are of these rows.

    A plan without a price is followed as far as there are nodes. Under a cap no step is longer than
    that, or than its plan; without one, more nodes may be verified than were planned, where they
    pay.
    """
    rows, nodes = len(view), len(drafted.row)
    if not plan.price or not nodes:
        return np.minimum(plan.length, np.bincount(drafted.row, minlength=rows))
    tokens = view.prefill_tokens + rows
    verify_s = times.verify_s(tokens, nodes + 1)
    if view.cap_s < math.inf:
        planned_s = times.verify_at(tokens + int(np.add.reduce(plan.length)))
        longest_s = planned_s + max(view.cap_s - plan.predicted_s, 0.0)
        verify_s = verify_s[: max(int(verify_s.searchsorted(longest_s * (1 + TIE), "right")), 1)]
    if view.change_tokens:
        verify_s = _changed_s(times, view, verify_s, tokens)
    likely = calibration.probability(drafted.draft, drafted.drawn, drafted.confidence)
    reading_s = times.node_context_s * view.context.take(drafted.row)
    return best_first(drafted.row, likely - plan.price * reading_s, verify_s, plan.price, rows)


def _changed_s(times: Times, view: View, verify_s: FloatArray, tokens: int) -> FloatArray:
    """Return ``verify_s`` of passes of ``tokens`` and more behind one of ``view.pass_tokens``.

    Another number takes a change longer; a narrower pass is filled up where that takes less.
    """
    last = view.pass_tokens
    same_s = times.verify_at(last)
    changed_s = verify_s + (times.verify_at(last + view.change_tokens) - same_s)
    filled = changed_s[: max(last - tokens + 1, 0)]
    np.minimum(filled, same_s, out=filled)
    return changed_s


def best_first(
    row: IntArray, worth: FloatArray, verify_s: FloatArray, price: float, rows: int
) -> IntArray:
    """Return how many nodes of each row have the highest net worth together, int64[rows].

    ``row[q]`` rises; ``worth[q]``, in tokens, never does within a row. ``verify_s[m]`` are the
    seconds of a pass with m nodes, ``price`` the tokens that a second is worth. Of equal choices it
    is the one with the fewest nodes.
    """
    nodes = np.empty(rows, np.int64)
    row, worth = np.ascontiguousarray(row, np.int64), np.ascontiguousarray(worth)
    loops.best_first(row, worth, np.ascontiguousarray(verify_s), price, nodes)
    return nodes
