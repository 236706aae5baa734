"""Which nodes the target verifies, once the drafts have proposed, and what their claims are worth.

The time of drafting is spent. A node is worth the chance that its path is what the target draws:
one more token of its row. Its verification, and reading what comes before it, cost time at the
plan's price. Over the whole batch the nodes worth most are verified, as many as leave the most:
every total is looked at, for a step of the staircase may lose what the next nodes bring. If a pass
is quicker after one of as many tokens, that total is often the best.

The chance is the draft's own confidence, calibrated (``Calibration``). A node may teach only if its
fate is known whatever the target drew, its parent being the text or verified: of deeper nodes only
failures are seen, and a draft that is cut short once would be believed less and less.

Drafts claim of a greedy row what they would of one at temperature 1, mostly too little for an
arg-max. Greedy rows are calibrated apart, and that corrects it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .loops import trim as loops
from .loops.times import Times
from .plan import BoolArray, DraftNodes, FloatArray, IntArray, Plan, View
from .problem import ints
from .tenants import with_rows

BINS = loops.BINS
EDGES = loops.BOUNDS[1:-1]
"""Edges of the bins of confidence; each bin holds its lower edge."""
KINDS, PLACES = loops.KINDS, loops.PLACES
COUNTS = ("nodes", "claimed", "matched", "likeliest")


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The worth of confidences, by draft and apart for greedy and ``sampled`` rows.

    With several tenants a draft has a column for each (``policy.tenants``). The map is linear
    between the bins' means, each shrunk towards the claim itself; it never falls, so that a row's
    best-first order stays.
    """

    counts: loops.Counts

    @classmethod
    def of(
        cls, nodes: FloatArray, claimed: FloatArray, matched: FloatArray, likeliest: FloatArray
    ) -> Calibration:
        """Return the calibration of these counts, [C, 2, KINDS, PLACES, BINS] each."""
        knots, accepted_at = np.zeros((2, *nodes.shape[:2], BINS + 2))
        counts = loops.Counts(nodes, claimed, matched, likeliest, knots, accepted_at)
        loops.set_maps(counts)
        return cls(counts)

    @classmethod
    def none(cls, drafts: int) -> Calibration:
        """Return what is known before any node: every claim is believed."""
        zero = np.zeros((drafts, 2, KINDS, PLACES, BINS))
        return cls.of(zero, zero, zero, zero)

    def with_tenants(self, before: int, tenants: int, emptied: list[int]) -> Calibration:
        """Return the calibration of ``before`` tenants for ``tenants``; nothing is known of
        ``emptied`` rows.
        """
        columns = (getattr(self.counts, name) for name in COUNTS)
        return Calibration.of(*(with_rows(column, before, tenants, emptied) for column in columns))

    @staticmethod
    def claims(nodes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the least and the most that nodes can claim, float64[..., BINS] each."""
        return nodes * loops.BOUNDS[:-1], nodes * loops.BOUNDS[1:]

    @staticmethod
    def bins(confidence: FloatArray) -> IntArray:
        """Return the bins of confidences, int64[q]."""
        return EDGES.searchsorted(confidence, side="right")

    def probability(
        self, column: IntArray, sampled: BoolArray, confidence: FloatArray
    ) -> FloatArray:
        """Return how likely the target draws the paths to nodes, [q] each, by column of tenant and
        draft.
        """
        likely = np.empty(len(column))
        proposed = proposed_of(np.arange(len(column)), column, None, confidence, sampled)
        loops.calibrate(self.counts, proposed, likely)
        return likely

    def learnt(
        self,
        column: IntArray,
        sampled: BoolArray,
        confidence: FloatArray,
        accepted: BoolArray,
        row: IntArray | None = None,
        depth: IntArray | None = None,
        expected: FloatArray | None = None,
        present: BoolArray | None = None,
        steps: int = 1,
    ) -> Calibration:
        """Return the calibration after nodes that would be known either way, [q] each, by column
        of tenant and draft (-1: unknown).

        Nodes of a row follow one another; without rows each has one of its own. ``depth`` is as in
        ``policy.plan.DraftNodes``, ``expected`` as in ``policy.loops.trim.ProposedNodes``.
        Knowledge of columns without nodes fades by ``steps`` steps where rows that could have had
        some were ``present``, bool[C, 2] (None: nowhere).
        """
        if present is None:
            if not len(column):
                return self
            present = np.zeros(self.counts.nodes.shape[:2], np.bool_)
        row = np.arange(len(column)) if row is None else row
        proposed = proposed_of(row, column, depth, confidence, sampled, expected)
        after = loops.Counts(*(column.copy() for column in self.counts))
        right = np.ascontiguousarray(accepted, np.bool_)
        loops.learn_nodes(after, proposed, right, present, steps)
        loops.set_maps(after)
        return Calibration(after)


def proposed_of(
    row: IntArray,
    column: IntArray,
    depth: IntArray | None,
    confidence: FloatArray,
    sampled: BoolArray,
    expected: FloatArray | None = None,
) -> loops.ProposedNodes:
    """Return nodes, [q] each, as the loops take them; without a depth the rows have chains, in
    order, and without what was ``expected`` of their rows that is as the claims say.
    """
    if depth is None:
        depth = np.arange(len(row)) - np.searchsorted(row, row)
    return loops.ProposedNodes(
        ints(row),
        ints(column),
        ints(depth),
        np.ascontiguousarray(confidence, np.float64),
        np.ascontiguousarray(sampled, np.bool_),
        np.ascontiguousarray(confidence if expected is None else expected, np.float64),
    )


def trim_nodes(
    times: Times,
    calibration: Calibration,
    view: View,
    plan: Plan,
    drafted: DraftNodes,
) -> IntArray:
    """Return how many of each row's nodes are verified, int64[n], at the plan's price; view and
    plan are of these rows.

    Under a cap no step is longer than that, or than its plan; without one, more nodes may be
    verified than were planned, where they pay.
    """
    nodes = np.empty(len(view), np.int64)
    step = loops.Pass(
        ints(view.context),
        int(view.prefill_tokens + len(view)),
        float(plan.price),
        int(plan.length.sum()),
        max(view.cap_s - plan.predicted_s, 0.0),
        int(view.pass_tokens),
        int(view.change_tokens),
    )
    d = drafted
    proposed = proposed_of(d.row, d.draft, d.depth, d.confidence, d.sampled)
    loops.trim(times, calibration.counts, step, proposed, nodes)
    return nodes
