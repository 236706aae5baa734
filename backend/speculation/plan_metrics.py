"""The metrics of plans and their steps; names as in ``backend.ops.metric_names``."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import Any

import numpy as np

from backend.ops.stats import StepStats
from policy import NO_DRAFT, BoolArray, IntArray, Outcome, Plan, StepNodes, StepRows
from policy.guard import GuardVerdict
from policy.levels import LEVELS, bucket_of, rows_of
from policy.trim import EDGES, Calibration

SMALL_PROPOSAL_TOKENS = 4
"""Tokens drafted for a batch that cost too little to matter if none is verified."""

_PROMISE_KEPT = 0.98  # of the sums of promises, with each step
_CLAIMED = [str(edge) for edge in (*EDGES, 1.0)]


class PlanMetrics:
    """Counts steps with their plans."""

    def __init__(self, steps: StepStats) -> None:
        self._steps, self._stats = steps, steps.counted
        self._promises: dict[str, Any] = {}  # float64[4] by rows: promised, measured tokens, s

    def guard(self, verdicts: list[GuardVerdict]) -> None:
        """Set the gauges of what the guard found."""
        for verdict in verdicts:
            level = next(level for level, name in LEVELS.items() if name == verdict.level)
            self._stats.gauge("spindle_guard_level", level, rows=verdict.rows)
            if verdict.ratio == verdict.ratio:  # else not measured
                self._stats.gauge("spindle_guard_ratio", verdict.ratio, rows=verdict.rows)

    def step(
        self, plan: Plan, outcome: Outcome, drafts: tuple[str, ...], control: list[bool]
    ) -> None:
        """Record one step, and what became of its plan; ``control`` says of each row of the outcome
        whether it is of the control arm.
        """
        times = outcome.times
        self._steps.step(len(plan.length), times.measured_s, times.parts_s)
        if plan.predicted_s:  # else nothing was predicted
            self._stats.observe("spindle_step_predicted_seconds", plan.predicted_s)
            if not outcome.prefill_tokens:
                self._promise(plan, outcome)
        if int(outcome.rows.length.sum()) > SMALL_PROPOSAL_TOKENS:
            nodes = int(outcome.rows.verified.sum())
            label = str(nodes) if nodes < 2 else "more"
            self._stats.count("spindle_drafted_steps_total", verified=label)
        if level := plan.notes.get("experiment"):
            self._stats.count("spindle_guard_experiment_steps_total", level=level)
        if plan.shadow is not None:
            self._shadow(plan.shadow, drafts)
        draft = outcome.rows.draft
        kinds = sorted(set(zip(draft.tolist(), control, strict=True)))
        for d, theirs in kinds:
            which = slice(None)
            if len(kinds) > 1:
                which = (draft == d) & (np.array(control) == theirs)
            name, arm = drafts[d] if d != NO_DRAFT else "none", self._steps.arm(theirs)
            self._draft(name, arm, outcome.rows, which)
        if len(outcome.nodes):
            self._nodes(draft[outcome.nodes.row], outcome.nodes, drafts)

    def _promise(self, plan: Plan, outcome: Outcome) -> None:
        """Count what a plan promised and what its step brought, by rows."""
        rows = rows_of(bucket_of(len(plan.length)))
        tokens, seconds = float(outcome.rows.emitted.sum()), outcome.times.measured_s
        self._stats.count("spindle_promised_seconds_total", plan.predicted_s, rows=rows)
        self._stats.count("spindle_planned_step_seconds_total", seconds, rows=rows)
        self._stats.count("spindle_promised_tokens_total", plan.predicted_tokens, rows=rows)
        self._stats.count("spindle_planned_step_tokens_total", tokens, rows=rows)
        step = np.array([plan.predicted_tokens, tokens, plan.predicted_s, seconds])
        self._promises[rows] = _PROMISE_KEPT * self._promises.get(rows, 0.0) + step

    def promise(self, rows: str) -> tuple[float, float] | None:
        """Return tokens and seconds of the latest planned steps of a range of rows over what their
        plans promised (any thread); None: there were none.
        """
        if (sums := self._promises.get(rows)) is None:
            return None
        return float(sums[1] / sums[0]), float(sums[3] / sums[2])

    def _nodes(
        self,
        draft: IntArray,  # [q]
        judged: StepNodes,
        drafts: tuple[str, ...],
    ) -> None:
        """Count nodes, and those that were accepted, by the confidence that was claimed of them."""
        columns = draft, judged.sampled, Calibration.bins(judged.confidence)
        nodes = list(zip(*(column.tolist() for column in columns), strict=True))
        counts, accepted = Counter(nodes), Counter(compress(nodes, judged.accepted.tolist()))
        labels = {
            (d, sampled, b): (
                ("claimed", _CLAIMED[b]),
                ("draft", drafts[d]),
                ("drawn", "true" if sampled else "false"),
            )
            for d, sampled, b in counts
        }
        for name, counted in (("", counts), ("_held", accepted)):
            amounts = ((text, counted[node]) for node, text in labels.items())
            self._stats.count_all(f"spindle_draft_nodes{name}_total", amounts)

    def _shadow(self, plan: Plan, drafts: tuple[str, ...]) -> None:
        for d, k in zip(plan.draft.tolist(), plan.length.tolist(), strict=True):
            self._stats.observe("spindle_shadow_draft_length", k, draft=drafts[d] if k else "none")
        self._stats.count("spindle_shadow_predicted_seconds_total", plan.predicted_s)
        self._stats.count("spindle_shadow_predicted_tokens_total", plan.predicted_tokens)

    def _draft(
        self,
        name: str,
        arm: str,
        rows: StepRows,
        which: BoolArray | slice,  # [m]
    ) -> None:
        emitted, length = rows.emitted[which].tolist(), rows.length[which]
        self._stats.count("spindle_emitted_tokens_total", sum(emitted), draft=name, arm=arm)
        self._stats.observe("spindle_draft_length", *length.tolist(), draft=name, arm=arm)
        if name == "none":
            return
        verified, followed = (int(c[which].sum()) for c in (rows.verified, rows.followed))
        self._stats.count("spindle_draft_tokens_total", verified, draft=name, arm=arm)
        self._stats.count("spindle_accepted_tokens_total", followed, draft=name, arm=arm)
        proposals = int((rows.verified[which] > 0).sum())
        self._stats.count("spindle_verified_proposals_total", proposals, draft=name, arm=arm)
        most = int(length.max())
        for kind, lengths in (("draft", length), ("accepted", rows.accepted[which])):
            reaching = enumerate(_reaching(lengths, most), 1)
            amounts = (((("draft", name), ("position", str(p))), n) for p, n in reaching)
            self._stats.count_all(f"spindle_{kind}_tokens_by_position_total", amounts)


def _reaching(lengths: IntArray, most: int) -> list[int]:
    """Return how many of ``lengths[m]`` are 1 or more, 2 or more, and so on up to ``most``."""
    shorter = np.bincount(lengths, minlength=most).cumsum()[:most]
    reaching: list[int] = (len(lengths) - shorter).tolist()
    return reaching
