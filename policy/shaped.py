"""The adaptive planner for engines that can do more than one proposal a row: cohorts, cut contexts.

The joint choice of drafts and lengths comes first. Cohorts are judged by the times of what was
chosen. How contexts are cut depends on nothing that is chosen: it is a part of the step's fixed
time.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from .acceptance import AcceptanceState, Expected
from .cohorts import best_cohorts, numbered, together
from .correction import Target
from .decomposition import Decomposition, best_piece
from .goodput import Choice, StepProblem
from .latency import VERIFY, LatencyModel
from .plan import FloatArray, IntArray, Outcome, Plan, TurnShape, View
from .planner import AdaptivePlanner
from .planner_state import PlannerConfig, PlannerState
from .problem import Given
from .shapes import CHAINS_ONLY, COHORTS, NO_SPECULATION, NOT_LONG_ENOUGH, OTHER_ARM, PIECES, Shapes


class ShapedPlanner(AdaptivePlanner):
    """``AdaptivePlanner`` with ``Plan.shape`` for an engine of these capabilities; ``notes["why_not"]`` says why each was not used."""

    keeps_chains = False  # shapes are offered anew in every step

    def __init__(
        self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None, shapes: Shapes | None = None
    ) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        super().__init__(drafts, latency, config)
        self.shapes = shapes or Shapes()

    # -- plan

    def plan(self, view: View, state: PlannerState, now: float, rng: np.random.Generator) -> tuple[Plan, PlannerState]:
        """Choose drafts and lengths, then the shape that they get."""
        plan, after = super().plan(view, state, now, rng)
        cut = self._cut(view.context[view.ready])
        why_not = {**CHAINS_ONLY, PIECES: cut.why_not}
        shape = TurnShape(piece_tokens=cut.piece_tokens or None)
        refusal = OTHER_ARM if view.given is not None else NO_SPECULATION if "kept" in plan.notes else ""
        if self.shapes.cohorts > 1 and refusal:
            why_not[COHORTS] = refusal
        elif self.shapes.cohorts > 1:
            after = replace(after, overlap_s=state.overlap_s, overlaps=state.overlaps, flying=state.flying)
            plan, shape, after = self._in_cohorts(view, plan, after, shape, why_not)
        notes = {**plan.notes, "why_not": {name: why for name, why in why_not.items() if why}}
        return self._promised(replace(plan, notes=notes, shape=None if _is_empty(shape) else shape), after, state)

    def problem(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[StepProblem, IntArray, Expected, Given]:
        """Return the planner's choice, padding in its fixed time."""
        problem, rows, expected, given = super().problem(view, state, acceptance)
        if self.shapes.pads:
            context = view.context[view.ready]
            padding_s = self._padding_s(self._cut(context).work_tokens, context)
            verify_s = problem.verify_s + state.correction[VERIFY] * padding_s
            problem = replace(problem, verify_s=verify_s)
        return problem, rows, expected, given

    def _in_cohorts(
        self, view: View, plan: Plan, after: PlannerState, shape: TurnShape, why_not: dict[str, str]
    ) -> tuple[Plan, TurnShape, PlannerState]:
        """Return plan, shape and state with cohorts where they shorten the step, and have or will have paid for their first round.

        What cohorts would save or cost is summed up between 0 and the price of a first round: at that price they begin, at 0 they end.
        A plan for a cohort while others are in flight tells of its share of a step.
        """
        choice, others, flying = together(view, Choice(plan.draft, plan.length), after.flying or {})
        if not choice.length.any():
            why_not[COHORTS] = NO_SPECULATION
            return plan, shape, replace(after, overlap_s=0.0, overlaps=False, flying=None)
        share, most = np.count_nonzero(view.ready) / len(view), self.shapes.cohorts
        times, contention = (self.corrected(after), after.correction), self.shapes.contention
        found = best_cohorts(*times, view, choice, contention, most, others)
        overlap_s = min(max(after.overlap_s + share * found.gain_s, 0.0), found.fill_s)
        overlaps = found.cut is not None and overlap_s > 0 and (after.overlaps or overlap_s >= found.fill_s)
        why_not[COHORTS] = "" if overlaps else found.why_not or NOT_LONG_ENOUGH
        if not overlaps or found.cut is None:
            return plan, shape, replace(after, overlap_s=overlap_s, overlaps=False, flying=None)
        flying = flying if others else numbered(view, choice, found.cut)
        after = replace(after, overlap_s=overlap_s, overlaps=True, flying=flying)
        one_s = found.step_s + (found.gain_s if found.cohorts > 1 else 0.0)
        return replace(plan, predicted_s=share * (one_s - found.gain_s)), replace(shape, cohort=found.cut), after

    # -- padding

    def _cut(self, context: IntArray) -> Decomposition:
        """Return how contexts of rows are cut."""
        return best_piece(context, self.shapes.pads, self.shapes.merge_tokens, self.shapes.block_tokens)

    def _padding_s(self, work_tokens: float, context: IntArray) -> float:
        """Return the uncorrected seconds that reading so many tokens takes longer than reading the contexts."""
        return self.latency.target.context_s * (work_tokens - float(context.sum()))

    # -- observe

    def _predicted_s(self, outcome: Outcome, view: View) -> tuple[FloatArray, Target]:
        """Return the uncorrected seconds by part: busy times of all cohorts, side by side; contexts padded or cut as they were."""
        shape = outcome.shape
        if shape is None or shape.cohort is None:
            predicted, target = super()._predicted_s(outcome, view)
        else:
            predicted, target = self._predicted_cohorts_s(outcome, shape.cohort, view)
        if not self.shapes.pads:
            return predicted, target
        context = view.context[np.isin(view.request, outcome.request)]
        padding_s = self._padding_s(self._work_tokens(context, shape.piece_tokens if shape else None), context)
        predicted[VERIFY] += padding_s
        return predicted, target._replace(other_s=target.other_s + padding_s)

    def _predicted_cohorts_s(
        self,
        outcome: Outcome,
        cohort: IntArray,
        view: View,
    ) -> tuple[FloatArray, Target]:
        """Return the busy seconds of all cohorts; the target's forwards are told by the tokens of the first."""
        contention = self.shapes.contention or 1.0
        count = int(cohort.max()) + 1
        parts = [_part(outcome, np.flatnonzero(cohort == c), c) for c in range(count)]
        seconds, targets = zip(*(AdaptivePlanner._predicted_s(self, part, view) for part in parts), strict=True)
        base_s, other_s = (contention * sum(column) for column in zip(*(target[1:] for target in targets), strict=True))
        return contention * np.sum(seconds, axis=0), Target(targets[0].tokens, base_s, other_s)

    def _work_tokens(self, context: IntArray, piece_tokens: int | None) -> float:
        """Return the tokens read for contexts in pieces of a length, or padded (None)."""
        if piece_tokens is None:
            return float(len(context) * context.max(initial=0))
        return (piece_tokens + self.shapes.merge_tokens) * float((-(-context // piece_tokens)).sum())


def _is_empty(shape: TurnShape) -> bool:
    return all(getattr(shape, item.name) is None for item in fields(shape))


def _part(outcome: Outcome, rows: IntArray, cohort: int) -> Outcome:
    """Return one cohort's outcome as far as its time depends on it; the first has the prompts."""
    names = ("request", "draft", "length", "verified")
    columns = {name: getattr(outcome, name)[rows] for name in names}
    prefill_tokens = outcome.prefill_tokens if cohort == 0 else 0
    return replace(outcome, **columns, prefill_tokens=prefill_tokens, shape=None)
