"""What the adaptive planner learns of its steps: acceptance, the time that they take, and how far they held what was promised."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from .acceptance import AcceptanceModel, AcceptanceState
from .calibration import Calibration
from .correction import Shape, Target, corrected, correction_by_part, learnt, shaped
from .keeping import averaged
from .latency import FIRST_DRAFT, OVERHEAD, VERIFY, LatencyModel
from .learned import restored, saved
from .plan import FloatArray, Outcome, View
from .planner_state import PlannerConfig, PlannerState
from .problem import predicted_parts

_SURE_TOKENS = 20.0  # of a plan, for which each is taken to bring one node
_MEMORY_TOKENS = 2000.0  # of plans with a draft, of which it is known how many nodes they brought
_TIMED_STEPS = 4  # of steps with a kept choice, which are alike, one in so many is held against its prediction


class Learner:
    """Learns from every step's outcome. All figures come from it and from the latency model: no clock, no files.

    ``latency`` has one curve per name in ``drafts``, in that order.
    """

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        if len(latency.drafts) != len(drafts):
            raise ValueError(f"latency must have one curve for each of the drafts {drafts}, got {len(latency.drafts)}")
        self.drafts = tuple(drafts)
        self.config = config or PlannerConfig()
        self.latency = latency
        self._parts = tuple(correction_by_part(latency.start(), self.drafts))
        self._shaped: tuple[FloatArray | None, LatencyModel] = None, latency  # of the last state: the same array, the same model
        self._charged: tuple[LatencyModel | None, tuple[float, ...], LatencyModel] = None, (), latency
        self._acceptance = AcceptanceModel(len(drafts), self.config.k_max, self.config.acceptance)

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        calibration, nodes = Calibration.none(len(self.drafts)), np.zeros((2, len(self.drafts)))
        return PlannerState(self._acceptance.start(), self.latency.start(), calibration, nodes)

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, without the requests in flight (see ``policy.learned``)."""
        if state.unlearnt:
            acceptance, calibration = self._learnt(state, now), self._calibrated(state)
            state = replace(state, acceptance=acceptance, calibration=calibration)
        return saved(state, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the state of what was saved ``idle_s`` ago. Raises LearnedError naming field and value."""
        return restored(data, self.start(), self._acceptance, now, idle_s)

    def drift(self, state: PlannerState) -> dict[str, float]:
        """Return measured over predicted time by part of the step, for metrics; 1 = the latency tables still hold."""
        return correction_by_part(state.correction, self.drafts)

    def corrected(self, state: PlannerState) -> LatencyModel:
        """Return the latency model with the shape that was learnt for the target's curve; all else is in ``state.correction``."""
        applied = state.target_shape.applied
        if applied is not self._shaped[0]:
            self._shaped = applied, self.latency.with_target(shaped(self.latency.target, applied))
        return self._shaped[1]

    def charged(self, state: PlannerState, rows: int) -> LatencyModel:
        """Return ``corrected`` with every draft's forward charged for the nodes that it brings beyond one.

        A plan counts a proposed token as one node; how many the trim verifies for it is learnt by draft.
        A node's seconds are the mean of the next four of each of the rows.
        """
        latency, correction = self.corrected(state), state.correction
        first_s, last_s = latency.target.at(rows), latency.target.at(5 * rows)
        node_s = correction.item(VERIFY) * (last_s - first_s) / max(4 * rows, 1)
        verified, planned = state.nodes
        more = (verified + _SURE_TOKENS) / (planned + _SURE_TOKENS) - 1
        extra_s = tuple(float(f"{s:.1e}") for s in more * node_s / correction[FIRST_DRAFT:])
        if self._charged[0] is not latency or self._charged[1] != extra_s:
            pairs = zip(latency.drafts, extra_s, strict=True)
            drafts = tuple(replace(c, row_s=max(c.row_s + s, 0.0)) for c, s in pairs)
            self._charged = latency, extra_s, replace(latency, drafts=drafts)
        return self._charged[2]

    def stand_by(self, view: View, state: PlannerState) -> PlannerState:
        """Return the state before a step that another plans: its acceptance and times are learnt."""
        return replace(state, view=view, planned=True, trial_s=0.0, promise=replace(state.promise, seconds=0.0))

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn acceptance (chosen drafts and counterfactuals), and correct the latency model."""
        learning_s = averaged(state.learning_s, outcome.parts_s.get("learning", 0.0)) if state.behind else state.learning_s
        if not state.planned and len(outcome.request):
            after = replace(state, unlearnt=(*state.unlearnt, outcome), learning_s=learning_s)
        else:
            acceptance, calibration = self._learnt(state, now, outcome), self._calibrated(state, outcome)
            after = replace(state, acceptance=acceptance, calibration=calibration, unlearnt=(), learning_s=learning_s)
        if state.view is not None and len(outcome.request) and (state.planned or state.kept is None or not state.kept.steps % _TIMED_STEPS):
            after.correction, after.target_shape = self._timed(outcome, state, state.view)
        after.nodes = self._counted(outcome, state.nodes)
        after.promise = state.promise.after(outcome)
        if state.trial_s and outcome.ran is None:  # else it is of other rows
            after.credit_s, after.trial_s = state.credit_s - self._trial_cost_s(outcome, state), 0.0
        if state.planned and len(outcome.request):
            after.planning_s = averaged(state.planning_s, outcome.parts_s.get("planning", 0.0))
        return after

    def _learnt(self, state: PlannerState, now: float, *outcomes: Outcome) -> AcceptanceState:
        """Return what is known of acceptance after the steps that were not learnt from, and these; requests that ended in them are gone."""
        acceptance, steps = self._acceptance.aged(state.acceptance, now), (*state.unlearnt, *outcomes)
        if not steps:
            return acceptance
        chains = [(o.request, o.draft, o.accepted, o.scored) for o in steps]
        free = [o for o in steps if len(o.free_request)]
        chains += [(o.free_request, o.free_draft, o.free_accepted, o.free_scored) for o in free]
        request, draft, accepted, scored = map(np.concatenate, zip(*chains, strict=True))
        emitted = np.concatenate([o.emitted for o in steps])
        acceptance = self._acceptance.observe(acceptance, request, draft, accepted, scored, emitted)
        return self._acceptance.forget(acceptance, itertools.chain.from_iterable(o.finished.tolist() for o in steps))

    def _counted(self, outcome: Outcome, nodes: FloatArray) -> FloatArray:
        """Return ``PlannerState.nodes`` after a step."""
        used = outcome.draft >= 0
        if not used.any():
            return nodes
        draft, size = outcome.draft[used], len(self.drafts)
        both = outcome.verified[used], outcome.length[used]
        new = np.array([np.bincount(draft, counts, size) for counts in both])
        counted: FloatArray = nodes * np.exp(-new[1] / _MEMORY_TOKENS) + new
        return counted

    @staticmethod
    def _calibrated(state: PlannerState, *outcomes: Outcome) -> Calibration:
        """Return what confidences are worth after the steps that were not learnt from, and these."""
        steps = [o for o in (*state.unlearnt, *outcomes) if len(o.node_draft)]
        if not steps:
            return state.calibration
        nodes = [(o.node_draft, o.node_drawn, o.node_confidence, o.node_held) for o in steps]
        return state.calibration.learnt(*map(np.concatenate, zip(*nodes, strict=True)))

    def _trial_cost_s(self, outcome: Outcome, state: PlannerState) -> float:
        """Return what a probe took beyond its prediction, which it was paid by: the look for it, and a draft that was not in any cache.

        Of one step's surprise only as much as the step was to take.
        """
        surprise_s = outcome.measured_s - outcome.parts_s.get("learning", 0.0) - state.planning_s - state.trial_s
        return min(max(surprise_s, -state.trial_s), state.trial_s)

    def _timed(self, outcome: Outcome, state: PlannerState, view: View) -> tuple[FloatArray, Shape]:
        """Return the correction and the shape after the step's time is held against what the model says of the step as it was executed.

        Planning and learning are in no prediction: a choice is kept for so long that they take their share of the time, whatever it is.
        """
        predicted_s, target = self._predicted_s(outcome, view)
        expected_s = predicted_s * state.correction
        step_s = float(expected_s.sum())
        measured_s = np.array([outcome.parts_s.get(name, 0.0) for name in self._parts])
        measured_s[OVERHEAD] -= min(outcome.parts_s.get("planning", 0.0) + outcome.parts_s.get("learning", 0.0), measured_s.item(OVERHEAD))
        if not measured_s.any():  # an engine that times nothing but the whole: all parts share its surprise, which tells of no shape
            measured_s = expected_s * (outcome.measured_s / step_s if step_s > 0 else 0.0)
            return corrected(state.correction, predicted_s, measured_s), state.target_shape
        return learnt(state.correction, state.target_shape, predicted_s, measured_s, target)

    def _predicted_s(self, outcome: Outcome, view: View) -> tuple[FloatArray, Target]:
        """Return the uncorrected seconds by part that a step of the last view should have taken as it was executed, and the target's."""
        return predicted_parts(self.latency, outcome, view)
