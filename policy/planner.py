"""The adaptive planner: before every step one joint choice of drafts and lengths, by what was
learnt of acceptance and of times; after it, what the step taught.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .acceptance import AcceptanceConfig, AcceptanceModel, AcceptanceState
from .evidence import EVIDENCE_BINS
from .latency import Correction, LatencyModel
from .learned import Learnt, restore_learnt, save_learnt
from .loops import problem as problem_loops
from .loops import step as step_loops
from .loops import times as time_loops
from .loops.acceptance import Chains, Claims
from .loops.compiling import compile_all
from .loops.device import Supply
from .loops.problem import Limits, StepProblem, ViewRows
from .loops.times import OCTAVES, TimedStep
from .plan import (
    BoolArray,
    DraftNodes,
    FloatArray,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    Policy,
    StepRows,
    View,
    copier,
)
from .problem import batch_of, evidence_of, ints
from .supply import learnt as learnt_supply
from .supply import no_supply, with_tenants
from .tenants import NO_TENANT, Tenants
from .trim import Calibration, proposed_of, trim_nodes

_LEARN_PLAIN, _PLAIN_EVERY = 8, 16
"""Plain steps that are learnt from one by one, and after them the steps for each one that is. They
teach times and let evidence fade.
"""
_MOST_RESTS = 15
"""Steps without nodes after which what is known of drafts that rest fades by all of them."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Constants of the planner; raises ValueError naming the one that is out of range."""

    k_max: int = 8
    """The most tokens that are speculated for a request."""
    explore_share: float = 0.001
    """Share of the time that goes into trials with one or two drafts; as much again for each
    further draft. Five times this share, whatever the drafts, while nothing speculates.
    """
    optimism: float = 1.5
    """Standard deviations above the mean that a trial hopes for."""
    switch_horizon_steps: float = 16.0
    """The most steps over which a catch-up is spread."""
    waiting_price: bool = True
    """The price of time counts the requests in prefill, which wait for the step."""
    catchup_scored: bool = False
    """Engines report how a draft that catches up would have guessed what it reads."""
    padded_tokens: int = 0
    """Tokens that every row runs if any row speculates, on an engine that pads; 0: its own."""
    first_plain_steps: int = 0
    """Steps of each octave of rows that are plain, before what they take is compared: tables are
    made without the rest of serving.
    """
    whole_batch: bool = False
    """The target's device runs the drafts: a step has one of them, as deep for all rows, and as
    many nodes as the plan says are verified, the likeliest of the batch.
    """
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.explore_share < 1:
            raise ValueError(f"explore_share must be in [0, 1), got {self.explore_share}")
        for name in ("k_max", "padded_tokens", "first_plain_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("optimism", "switch_horizon_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class PlannerState:
    """The planner's state from step to step."""

    acceptance: AcceptanceState
    correction: Correction
    calibration: Calibration
    tenants: Tenants = field(default_factory=Tenants)
    rests: int = 0
    """Steps since nodes were last learnt from."""
    plain: int = 0
    """Plain steps since the last one with proposals."""
    unlearnt: int = 0
    """Plain steps since the last one that was learnt from."""
    goodput: float = 0.0
    """The last batch's, in tokens per second without prefill; 0: unknown."""
    trial_budget_s: float = 0.0
    """Time saved for trials."""
    next_trial_s: float = 0.0
    """The budget at which a trial is looked for again."""
    first_plain: tuple[int, ...] = (0,) * OCTAVES
    """By octave of rows, the first plain steps so far."""
    supply: Supply = field(default_factory=lambda: no_supply(0, 0))
    """The nodes that drafts show that the target's device runs."""

    def column(self, draft: IntArray, slot: IntArray) -> IntArray:
        """Return the columns of drafts and slots, int64[n] each, -1 where there is none."""
        if self.tenants.rows == 1:
            return draft
        estimates = self.acceptance.estimates
        tenant = np.where(slot >= 0, estimates.tenant[slot], NO_TENANT)
        column = tenant * estimates.deviation.shape[1] + draft
        return np.where((tenant >= 0) & (draft >= 0), column, -1)


_copied = copier(PlannerState)


class AdaptivePlanner(Policy[PlannerState]):
    """Chooses for all rows by the priced goodput of the whole batch (``policy.plan.Policy``).

    All figures come from the outcomes and from ``latency``, which has one curve for each of the
    ``drafts``, in order: no clock, no files. ``estimator`` replaces how acceptance is learnt.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        config: PlannerConfig | None = None,
        estimator: AcceptanceModel | None = None,
    ) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        if len(latency.drafts) != len(drafts):
            names = f"one curve for each of the drafts {drafts}"
            raise ValueError(f"latency must have {names}, got {len(latency.drafts)}")
        self.drafts, self.latency = tuple(drafts), latency
        self.config = c = config or PlannerConfig()
        self.estimator = estimator or AcceptanceModel(len(drafts), c.k_max, c.acceptance)
        horizon_steps = float(c.switch_horizon_steps)
        self._limits = Limits(c.k_max, horizon_steps, c.padded_tokens, int(c.whole_batch))
        self._parts = ("verify", "overhead", *(f"draft:{name}" for name in drafts))
        compile_all()

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        drafts = len(self.drafts)
        return PlannerState(
            acceptance=self.estimator.start(),
            correction=Correction.start(drafts),
            calibration=Calibration.none(drafts),
            supply=no_supply(drafts, self.config.k_max if self.config.whole_batch else 0),
        )

    # -- before a step

    def plan(
        self, view: View, state: PlannerState, now: float, rng: np.random.Generator
    ) -> tuple[Plan, PlannerState]:
        """Choose for the rows, whatever their order.

        Raises ValueError for a view with other drafts than the planner's, or with evidence that is
        no bin.
        """
        del rng
        if view.drafts != self.drafts:
            raise ValueError(f"view.drafts must be {self.drafts}, got {view.drafts}")
        _check_bins(view.evidence)
        after, config, n = self.admit(view, state, now), self.config, len(view)
        if self._is_first(view, after):
            octave = n.bit_length() - 1
            steps = list(after.first_plain)
            steps[octave] += 1
            after.first_plain = tuple(steps)
            return replace(Plan.nothing(n), notes={"first_plain": True}), after
        batch, knowledge = self._columns_of(view, after)
        mode = step_loops.Mode(
            float(state.goodput),
            int(config.waiting_price),
            float(config.explore_share),
            float(state.trial_budget_s),
            float(state.next_trial_s),
            float(config.optimism),
            int(config.catchup_scored),
        )
        draft, length = np.empty((2, n), np.int64)
        times = after.correction.times(self.latency)
        choice = step_loops.StepChoice._make(
            step_loops.choose(times, batch, self._limits, knowledge, mode, draft, length)
        )
        after.goodput = choice.goodput
        after.trial_budget_s, after.next_trial_s = choice.credit_s, choice.next_trial_s
        plan = Plan(draft, length, choice.step_s, choice.value, choice.price, nodes=choice.nodes)
        plan.notes["credit_s"] = state.trial_budget_s
        if choice.gain:
            plan.notes["gain"] = choice.gain
        if choice.trial:
            plan.notes["trial"] = choice.trial
        return plan, after

    def _is_first(self, view: View, state: PlannerState) -> bool:
        """Return whether a step is one of the first plain ones: nothing is known yet of what plain
        steps of about as many rows take.
        """
        if not len(view) or view.prefill_tokens or view.control_plan is not None:
            return False
        octave, most = len(view).bit_length() - 1, self.config.first_plain_steps
        if state.first_plain[octave] >= most:
            return False
        return bool(state.correction.octave_steps[octave : octave + 2].sum() < most)

    def _columns_of(self, view: View, state: PlannerState) -> tuple[ViewRows, step_loops.Knowledge]:
        """Return the columns of a view whose requests were admitted, and what is known of them."""
        rows = ints(view.request.argsort())
        request = ints(view.request.take(rows))
        slot, _ = state.acceptance.find(request)
        hazard = self.estimator.hazards(state.acceptance, request)
        estimates, constants = state.acceptance.estimates, self.estimator.constants
        counts, supply = state.calibration.counts, state.supply
        knowledge = step_loops.Knowledge(estimates, constants, counts, hazard, supply)
        return batch_of(view, rows, slot), knowledge

    def problem(self, view: View, state: PlannerState) -> tuple[StepProblem, IntArray]:
        """Return the choice that the planner has in a view, and its rows of the view. Every request
        has been admitted.
        """
        batch, knowledge = self._columns_of(view, state)
        times, price = state.correction.times(self.latency), float(state.goodput)
        expected = step_loops.expect(times, knowledge, batch, self.config.k_max, price)
        parts = problem_loops.build(times, batch, self._limits, *expected)
        return parts[0], batch.rows[parts[1]]

    def admit(self, view: View, state: PlannerState, now: float) -> PlannerState:
        """Return the state at a time, with a place for the requests of a view."""
        after = _copied(state)
        after.acceptance = self.estimator.decayed_to(state.acceptance, now)
        slot, missing = after.acceptance.find(ints(view.request))
        if not missing:
            return after
        new = slot < 0
        request = view.request[new]
        tenant = np.zeros(missing, np.int64) if view.tenant is None else view.tenant[new]
        most, requests = self.estimator.most_tenants, request.tolist()
        tenants, emptied = state.tenants.admit(requests, tenant.tolist(), most)
        if emptied or tenants.rows != state.tenants.rows:
            self._set_tenants(after, tenants.rows, emptied)
        after.tenants, rows = tenants, tenants.of(requests)
        after.acceptance = self.estimator.admit(after.acceptance, request, rows)
        return after

    def _set_tenants(self, after: PlannerState, tenants: int, emptied: list[int]) -> None:
        """Set the number of tenants, in place; nothing is known of ``emptied`` rows."""
        before = after.tenants.rows
        after.acceptance = self.estimator.with_tenants(after.acceptance, tenants, emptied)
        after.calibration = after.calibration.with_tenants(before, tenants, emptied)
        after.supply = with_tenants(after.supply, before, tenants, emptied)

    def trim(self, view: View, plan: Plan, drafted: DraftNodes, state: PlannerState) -> IntArray:
        """Verify the nodes that are worth their time at the plan's price (``policy.trim``)."""
        if not plan.price or not len(drafted.row):
            return np.minimum(plan.length, np.bincount(drafted.row, minlength=len(view)))
        times, request = state.correction.times(self.latency), ints(view.request)
        slot, _ = state.acceptance.find(request)
        claims = _claims(drafted.row, drafted.draft, drafted.depth, drafted.confidence)
        columns = state.acceptance, request, slot
        score, _ = self.estimator.weigh(*columns, evidence_of(view), claims)
        column = drafted.draft
        if state.tenants.rows > 1:
            column = np.maximum(state.column(column, slot[drafted.row]), 0)
        drafted = replace(drafted, draft=column, confidence=score)
        return trim_nodes(times, state.calibration, view, plan, drafted)

    # -- after a step

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn acceptance, times, what confidences are worth and what became of proposals."""
        after, rows, free, nodes = _copied(state), outcome.rows, outcome.free, outcome.nodes
        is_plain = not (len(nodes) or rows.length.any())
        after.plain = state.plain + (len(rows) > 0) if is_plain else 0
        is_known = state.plain > _LEARN_PLAIN and state.unlearnt < _PLAIN_EVERY - 1
        if is_plain and not len(free) and is_known and state.rests < _MOST_RESTS:
            after.unlearnt += len(rows) > 0
            after.rests += len(rows) > 0
            self._forget(after, outcome.finished)
            return after
        skipped, after.unlearnt = state.unlearnt, 0
        acceptance = self.estimator.decayed_to(state.acceptance, now)
        step, others = _chains(rows), _chains(free)
        passed = ints(rows.emitted), others, 1 + skipped
        acceptance, slot = self.estimator.observe(acceptance, step, *passed)
        if not len(nodes) and state.rests < _MOST_RESTS:
            after.rests += len(rows) > 0
        else:
            self._learn_nodes(after, state, outcome, step, slot)
        if (view := outcome.view) is not None and len(rows):
            after.correction = state.correction.learnt(
                lambda *learnt: self._learn_step(outcome, view, learnt)
            )
        after.acceptance = acceptance
        self._forget(after, outcome.finished)
        return after

    def _forget(self, after: PlannerState, finished: IntArray) -> None:
        """Forget requests int64[n] that are over, in place."""
        if len(finished):
            over = finished.tolist()
            after.acceptance = self.estimator.forget(after.acceptance, over)
            after.tenants = after.tenants.without(over)

    def _learn_nodes(
        self,
        after: PlannerState,
        state: PlannerState,
        outcome: Outcome,
        step: Chains,
        slot: IntArray,  # [m]
    ) -> None:
        """Learn what confidences are worth, and what drafts of the device show, in place."""
        nodes, drafts = outcome.nodes, len(self.drafts)
        column = state.column(step.draft, slot)[nodes.row]
        claims = _claims(nodes.row, step.draft[nodes.row], nodes.depth, nodes.confidence)
        evidence = np.repeat(step.evidence[:, None], drafts, axis=1)
        before = state.acceptance, step.request, slot
        score, expected = self.estimator.weigh(*before, evidence, claims)
        if self.config.whole_batch:  # the device chooses by the claims themselves
            score = claims.confidence
            proposed = proposed_of(claims.row, column, claims.depth, score, nodes.sampled, expected)
            after.supply = learnt_supply(state.supply, proposed, _places_of(outcome))
        columns = column, nodes.sampled, score, nodes.accepted
        place = claims.row, claims.depth, expected
        rest = self._present(state, slot, outcome.view), state.rests + 1
        after.calibration = state.calibration.learnt(*columns, *place, *rest)
        after.rests = 0

    def _present(self, state: PlannerState, slot: IntArray, view: View | None) -> BoolArray:
        """Return bool[C, 2]: the columns of the tenants that have rows at these slots int64[m], and
        whether any row is greedy or sampled.
        """
        sampled = None if view is None else view.sampled
        kinds = (True, False) if sampled is None else (not sampled.all(), bool(sampled.any()))
        present = np.zeros((state.tenants.rows, len(self.drafts), 2), np.bool_)
        tenant = state.acceptance.estimates.tenant[slot[slot >= 0]] if state.tenants.rows > 1 else 0
        present[tenant] = kinds
        return present.reshape(-1, 2)

    def _learn_step(
        self,
        outcome: Outcome,
        view: View,
        learnt: tuple[Any, ...],
    ) -> int:
        """Learn from a step's times, in place (``policy.loops.times.learn_step``).

        An engine that times nothing but the whole: all parts share its surprise, which shows no
        shape.
        """
        parts_s = outcome.times.parts_s
        measured_s = np.array([parts_s.get(name, 0.0) for name in self._parts])
        return time_loops.learn_step(
            self.latency.tables,
            self.step_of(outcome, view),
            measured_s,
            float(outcome.times.measured_s),
            *learnt,
        )

    def step_of(self, outcome: Outcome, view: View) -> TimedStep:
        """Return the rows of a step as the loops take them."""
        rows = outcome.rows
        return TimedStep(
            row=_rows_of(rows.request, view),
            draft=ints(rows.draft),
            length=ints(rows.length),
            verified=ints(rows.verified),
            context=ints(view.context),
            catchup=ints(view.catchup),
            prefill_tokens=int(outcome.prefill_tokens),
            padded_tokens=self._limits.padded_tokens,
            pass_tokens=int(outcome.pass_tokens),
            last_tokens=int(view.pass_tokens),
            change_tokens=int(view.change_tokens),
        )

    def drift(self, state: PlannerState) -> dict[str, float]:
        """Return measured over predicted time by part of the step; 1: the tables still hold.
        ``verifying`` is that of the decoding tokens in passes that verify any, ``verify`` apart.
        """
        factors = dict(zip(self._parts, state.correction.factor.tolist(), strict=True))
        del factors["overhead"]  # it is measured alone: no table has it
        return factors | {"verifying": math.exp(state.correction.verifying[0])}

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, without the requests in flight (``policy.learned``)."""
        if type(self.estimator) is not AcceptanceModel:
            return {}
        return save_learnt(_learnt(state), self.drafts, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the state of what was saved ``idle_s`` ago. Raises LearnedError."""
        start = self.start()
        if type(self.estimator) is not AcceptanceModel:
            return start
        learnt = restore_learnt(data, _learnt(start), self.drafts, self.estimator, now, idle_s)
        supply = with_tenants(start.supply, 1, learnt.tenants.rows, [])
        return replace(start, supply=supply, **learnt._asdict())


def _learnt(state: PlannerState) -> Learnt:
    return Learnt(state.acceptance, state.calibration, state.correction, state.tenants)


def _check_bins(evidence: IntArray | None) -> None:
    """Raise ValueError for a bin of evidence [n, D] that there is not: the loops index by it,
    unchecked.
    """
    if evidence is None or not evidence.size:
        return
    largest = ints(evidence).view(np.uint64).max()  # a negative one is larger than all, unsigned
    if largest >= EVIDENCE_BINS:
        bins = int(evidence.min()), int(evidence.max())
        raise ValueError(f"view.evidence must be 0 to {EVIDENCE_BINS - 1}, got {bins}")


def _chains(rows: StepRows | FreeChains) -> Chains:
    """Return the chains of a step as the loops take them."""
    evidence = np.zeros(len(rows), np.int64) if rows.evidence is None else rows.evidence
    columns = rows.request, rows.draft, rows.accepted, rows.scored, evidence
    return Chains(*map(ints, columns))


def _claims(
    row: IntArray, draft: IntArray, depth: IntArray | None, confidence: FloatArray
) -> Claims:
    """Return nodes, [q] each, as the loops take them; without a depth the rows have chains, in
    order.
    """
    if depth is None:
        depth = np.arange(len(row)) - np.searchsorted(row, row)
    return Claims(ints(row), ints(draft), ints(depth), np.ascontiguousarray(confidence, float))


def _places_of(outcome: Outcome) -> IntArray:
    """Return the places that the rows of a step were to propose for, int64[m]; 0: none, or it is
    not known.
    """
    if outcome.view is None or outcome.plan is None:
        return np.zeros(len(outcome.rows), np.int64)
    row = _rows_of(outcome.rows.request, outcome.view)
    return np.where(row >= 0, outcome.plan.length[row], 0)


def _rows_of(request: IntArray, view: View) -> IntArray:
    """Return the rows of a view that requests int64[m] have, -1 for those that it lacks."""
    if len(request) == len(view) and (request == view.request).all():
        return np.arange(len(view))
    place = {name: row for row, name in enumerate(view.request.tolist())}
    return np.array([place.get(r, -1) for r in request.tolist()], np.int64)
