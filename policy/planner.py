"""The adaptive planner: acceptance estimates, measured times and a price of time, one joint choice per step, and a budget to explore."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .acceptance import AcceptanceConfig, AcceptanceModel, AcceptanceState, Expected
from .correction import Shape, Target, corrected, correction_by_part, learnt, shaped
from .free_runs import free_run_tokens
from .goodput import Choice, Score, StepProblem, no_speculation
from .hints import Last
from .keeping import Kept, OfMany, averaged, kept
from .latency import OVERHEAD, VERIFY, LatencyModel
from .learned import restored, saved
from .one_row import one_row
from .plan import BoolArray, FloatArray, IntArray, Outcome, Plan, View
from .pricing import Priced, Problem, priced_choice, promised_gain
from .probing import PROBE_FLOOR, affordable
from .problem import NOTHING_GIVEN, Bounds, Given, chains_s, extra_prefill_s, predicted_parts, step_problem
from .promise import Promise
from .ranks import RankState
from .selection import PROBING, SELECTIONS, THOMPSON, Draws, Explorer
from .shapes import CHAINS_ONLY

_TIMED_STEPS = 4  # of steps with a kept choice, which are alike, one in so many is held against its prediction
_LOOK_STEPS = 4  # at most, from one look for a probe that found none to be had to the next: looking takes time too
_NONE_ACCEPTED = np.zeros((1, 0))


class Found(NamedTuple):
    """A choice with its score and the rows that probe in it; what may still be spent on probes, and the steps until the next look."""

    choice: Choice
    result: Score
    probes: int
    credit_s: float
    look: int


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Constants of the planner; raises ValueError naming the one that is out of range.

    ``selection`` says how drafts to try are found (``policy.selection``), ``explore_share`` is the share of step time that trying may cost,
    ``optimism`` how many standard deviations it hopes for. ``switch_horizon_steps`` the most steps over which a catch-up is spread.
    ``margin`` is the gain in goodput that speculation must promise: of many estimates the best is flattered, and a loss weighs more than
    a gain missed. Planning and learning may take ``planning_share`` of step time: where they take more, a choice is kept for some steps; a
    large batch that does not speculate keeps to that for ``rest_steps`` at the least (``policy.keeping``).
    ``free_run_tokens`` are the most that a row runs in one turn (``policy.free_runs``).
    ``catchup_scored`` says that the engines report how a draft that catches up would have guessed what it reads (``Outcome.free_*``).
    """

    k_max: int = 8
    selection: str = PROBING
    explore_share: float = 0.005
    optimism: float = 1.5
    switch_horizon_steps: float = 16.0
    margin: float = 0.03
    rest_steps: int = 4
    planning_share: float = 0.01
    free_run_tokens: int = 1
    catchup_scored: bool = False
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.k_max < 0:
            raise ValueError(f"k_max must be >= 0, got {self.k_max}")
        if not 0 <= self.explore_share < 1:
            raise ValueError(f"explore_share must be in [0, 1), got {self.explore_share}")
        if self.free_run_tokens < 1:
            raise ValueError(f"free_run_tokens must be >= 1, got {self.free_run_tokens}")
        for name in ("margin", "rest_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("optimism", "switch_horizon_steps", "planning_share"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {list(SELECTIONS)}, got {self.selection!r}")


@dataclass(slots=True, eq=False)
class PlannerState:
    """What the planner remembers. ``correction`` and ``target_shape`` as in ``policy.correction``; ``view`` the last one planned for.

    ``goodput`` is the best goodput of the last batch without its prefill (tokens per second of the model's time; 0: unknown).
    ``credit_s`` is what may still be spent on probes, ``look`` the steps until the next look for one, ``last`` what is kept of the last
    choice, ``kept`` the choice itself for some steps more; ``trial_s`` is what the step in hand is to take if it probes. ``planning_s`` and
    ``learning_s`` are what a step takes that is ``planned``; of the latter the next step tells, ``behind`` one that was. ``unlearnt`` are
    steps with a kept choice, which are learnt from together when planning is due. ``promise`` is how far speculation held what it promised.
    ``draws`` belongs to Thompson's selection; ``ranks``, ``overlap_s``, ``overlaps`` and ``flying`` (``policy.cohorts``) to
    ``policy.shaped``.
    """

    acceptance: AcceptanceState
    correction: FloatArray
    target_shape: Shape = field(default_factory=Shape.flat)
    view: View | None = None
    goodput: float = 0.0
    credit_s: float = 0.0
    look: int = 0
    last: Last = field(default_factory=Last)
    kept: Kept | None = None
    trial_s: float = 0.0
    planning_s: float = 0.0
    learning_s: float = 0.0
    planned: bool = False
    behind: bool = False
    unlearnt: tuple[Outcome, ...] = ()
    promise: Promise = field(default_factory=Promise)
    draws: Draws | None = None
    ranks: RankState | None = None
    overlap_s: float = 0.0
    overlaps: bool = False
    flying: dict[int, tuple[int, int, int, int]] | None = None


class AdaptivePlanner:
    """Chooses (draft, length) for every ready row by the priced goodput of the whole batch; implements ``policy.plan.Policy``.

    ``latency`` has one curve per name in ``drafts``, in that order. All figures come from it and from the outcomes: no clock, no files.
    """

    keeps_chains = True

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        if len(latency.drafts) != len(drafts):
            raise ValueError(f"latency must have one curve for each of the drafts {drafts}, got {len(latency.drafts)}")
        self.drafts = tuple(drafts)
        self.config = config or PlannerConfig()
        self.latency = latency
        self._explorer = Explorer(self.config.selection, self.config.optimism, self.config.catchup_scored)
        self._bounds = Bounds(self.config.k_max, self.config.switch_horizon_steps)
        self._parts = tuple(correction_by_part(latency.start(), self.drafts))
        self._shaped: tuple[FloatArray | None, LatencyModel] = None, latency  # of the last state: the same array, the same model
        self._acceptance = AcceptanceModel(len(drafts), self.config.k_max, self.config.acceptance)

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        return PlannerState(self._acceptance.start(), self.latency.start())

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, without the requests in flight (see ``policy.learned``)."""
        return saved(replace(state, acceptance=self._learnt(state, now)) if state.unlearnt else state, now)

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

    # -- plan

    def plan(self, view: View, state: PlannerState, now: float, rng: np.random.Generator) -> tuple[Plan, PlannerState]:
        """Choose for the ready rows, whatever their order; the others get no draft.

        Raises ValueError for a view with other drafts than the planner's.
        """
        if view.drafts != self.drafts:
            raise ValueError(f"view.drafts must be {self.drafts}, got {view.drafts}")
        if state.kept and (again := state.kept.next_step(view)):
            return self._promised(*self._again(*again, view, state), state)
        if self.config.selection == THOMPSON:
            draws = (state.draws or Draws()).next_step(view.request[ready_rows(view)].tolist(), len(self.drafts), rng)
            state = replace(state, draws=draws)
        acceptance = self.admitted(view, state, now)
        if len(view) == 1 and view.given is None and self.drafts and view.ready.item():
            return self._promised(*self._plan_one(view, state, acceptance), state)
        return self._promised(*self._plan_rows(view, state, acceptance), state)

    def needs_offers(self, request: IntArray, state: PlannerState) -> bool:
        """Return False where a plan without speculation is kept for these requests."""
        return not (isinstance(state.kept, OfMany) and state.kept.rests_for(request))

    @staticmethod
    def _promised(plan: Plan, after: PlannerState, before: PlannerState) -> tuple[Plan, PlannerState]:
        """Note what a plan promises."""
        after.promise = before.promise.of(plan)
        return plan, after

    def _again(self, plan: Plan, kept: Kept, view: View, state: PlannerState) -> tuple[Plan, PlannerState]:
        """Return a kept plan for a view and the state after it: who has come is known from the first step on."""
        acceptance, credit_s = state.acceptance, state.credit_s + self.config.explore_share * plan.predicted_s
        if state.kept is None or kept.requests != state.kept.requests:
            acceptance = self._acceptance.admit(acceptance, view.request.tolist(), None if view.group is None else view.group.tolist())
        if isinstance(kept, OfMany) and plan.length.any() and plan.length is not kept.plan.length:
            plan = self._judged_anew(plan, view, state)
        if view.prefill_tokens:
            plan = replace(plan, predicted_s=plan.predicted_s + self._prefill_s(view, state, len(view)))
        after = replace(state, acceptance=acceptance, view=view, credit_s=credit_s, kept=kept, planned=False, behind=state.planned)
        return plan, after

    def _judged_anew(self, plan: Plan, view: View, state: PlannerState) -> Plan:
        """Return a kept plan, of which some is no longer to be had, as it is predicted now; without speculation if that pays more."""
        latency, nothing = self.corrected(state), no_speculation(len(view))
        step_s = chains_s(latency, state.correction, view, Choice(plan.draft, plan.length))
        plain_s = chains_s(latency, state.correction, view, nothing)
        if plan.predicted_tokens * plain_s < promised_gain(1.0, self.config.margin, state.promise.kept) * len(view) * step_s:
            return replace(plan, draft=nothing.draft, length=nothing.length, predicted_s=plain_s, predicted_tokens=float(len(view)))
        return replace(plan, predicted_s=step_s)

    def _plan_one(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[Plan, PlannerState]:
        """Plan for a single row by plain numbers: what ``_plan_rows`` does, quicker."""
        hazard = self._acceptance.hazards_of(acceptance, view.request.item(), view.rule.item())
        problem = one_row(self.corrected(state), state.correction.tolist(), view, hazard, self._bounds)
        run, saved_s = self._free_run(problem.plain_s, view, state)
        problem = problem._replace(plain_s=problem.plain_s - saved_s)
        prefill_s = self._prefill_s(view, state, 1)
        priced = self._priced_choice(problem, prefill_s, view, state)
        notes = self._notes(problem, priced, prefill_s, state)
        found = self._found(priced, view, state)
        if self._may_look(state, found):
            as_rows, rows, expected, _ = self.problem(view, state, acceptance)
            found = self._looked(as_rows, view, rows, expected, acceptance, priced.price, found, state.draws)
            notes["probe"] = found.probes
        tokens = found.result.value / problem.base_value if problem.base_value else 1.0
        plan = Plan(found.choice.draft, found.choice.length, found.result.step_s, tokens, priced.price, notes, run=run)
        again = self._kept(plan, priced, found, ready_rows(view), _NONE_ACCEPTED, prefill_s, view, state)
        return plan, self._planned(state, acceptance, view, priced.goodput, found, Last(found.choice.length.item(), 1), again)

    def problem(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[StepProblem, IntArray, Expected, Given]:
        """Return the choice that the planner has in a view, its rows of the view, what is expected of them, and what is given beside."""
        rows = ready_rows(view) if view.flying is None else view.request.argsort()
        expected = self._acceptance.expected(acceptance, view.request[rows].tolist(), view.rule[rows])
        given, own = _split(view, rows, expected.hazard)
        if own is not None:
            rows, expected = rows[own], expected.rows(own)
        hint = state.last.hint(len(rows))
        problem = step_problem(self.corrected(state), state.correction, view, rows, expected.hazard, given, self._bounds, hint)
        return problem, rows, expected, given

    def admitted(self, view: View, state: PlannerState, now: float) -> AcceptanceState:
        """Return the estimator's state at a time, with a place for the requests of a view that share its step."""
        ready = slice(None) if view.decoding == len(view) else view.ready
        group = None if view.group is None else view.group[ready].tolist()
        return self._acceptance.admit(self._learnt(state, now), view.request[ready].tolist(), group)

    def _plan_rows(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[Plan, PlannerState]:
        """Plan for any number of rows, and look for a probe when it is time."""
        problem, rows, expected, given = self.problem(view, state, acceptance)
        run, saved_s = self._free_run(problem.plain_s, view, state)
        if saved_s and not given.tokens:
            problem.verify_s[0] -= saved_s
        prefill_s = self._prefill_s(view, state, len(rows) + len(given.rows) + given.tokens)
        priced = self._priced_choice(problem, prefill_s, view, state)
        notes = self._notes(problem, priced, prefill_s, state)
        found = self._found(priced, view, state)
        if self._may_look(state, found):
            found = self._looked(problem, view, rows, expected, acceptance, priced.price, found, state.draws)
            notes["probe"] = found.probes
        draft, length = _scattered(found.choice, rows, len(view))
        tokens = _tokens(problem, view.weight[rows], found.choice, found.result.value - given.value) + given.expected_tokens
        plan = Plan(draft, length, found.result.step_s, tokens, priced.price, notes, run=run)
        last = state.last.followed_by(priced.choice, int(np.add.reduce(length)), priced.bound)
        accepted = _accepted(problem, priced.choice, view, rows)
        again = self._kept(plan, priced, found, rows, accepted, prefill_s, view, state)
        return plan, self._planned(state, acceptance, view, priced.goodput, found, last, again)

    def _planned(
        self, state: PlannerState, acceptance: AcceptanceState, view: View, goodput: float, found: Found, last: Last, again: Kept | None
    ) -> PlannerState:
        """Return the state after planning."""
        return PlannerState(
            acceptance=acceptance,
            correction=state.correction,
            target_shape=state.target_shape,
            view=view,
            goodput=goodput,
            credit_s=found.credit_s,
            look=found.look,
            last=last,
            kept=again,
            trial_s=found.result.step_s if found.probes else 0.0,
            planning_s=state.planning_s,
            learning_s=state.learning_s,
            planned=True,
            behind=state.planned,
            draws=state.draws,
        )

    def _kept(
        self,
        plan: Plan,
        priced: Priced,
        found: Found,
        rows: IntArray,
        accepted: FloatArray,
        prefill_s: float,
        view: View,
        state: PlannerState,
    ) -> Kept | None:
        """Return what is kept of a plan: neither what it tries out, which is paid for once, nor the time of this step's prefill."""
        again, planning_s = replace(plan, predicted_s=priced.result.step_s - prefill_s), state.planning_s + state.learning_s
        if found.probes:
            again.draft, again.length = _scattered(priced.choice, rows, len(view))
        share, rest_steps = self.config.planning_share, self.config.rest_steps
        return kept(again, view, accepted, planning_s, share, rest_steps, state.kept, chains=self.keeps_chains)

    def _found(self, priced: Priced, view: View, state: PlannerState) -> Found:
        """Return the choice before a look for probes, the step's earning saved: who is in flight earns when it is planned for."""
        credit_s = state.credit_s + view.share * self.config.explore_share * priced.result.step_s
        return Found(priced.choice, priced.result, 0, credit_s, max(state.look - 1, 0))

    def _notes(self, problem: Problem, priced: Priced, prefill_s: float, state: PlannerState) -> dict[str, Any]:
        """Return figures for traces: ``gain`` over not speculating; in a step that searched, ``gap``, how much better the
        best choice may be by the dual bound, as a share of the tokens.
        """
        notes: dict[str, Any] = {"probe": 0, "credit_s": state.credit_s, "why_not": CHAINS_ONLY}
        if problem.base_value:
            notes["gain"] = priced.goodput * (problem.plain_s - prefill_s) / problem.base_value
            if priced.bound < math.inf:
                notes["gap"] = (priced.bound - priced.result.objective(priced.price)) / priced.result.value
        return notes

    def _prefill_s(self, view: View, state: PlannerState, tokens: int) -> float:
        """Return how much longer a step of so many other tokens takes for its prefill."""
        return extra_prefill_s(self.corrected(state), state.correction, view, tokens)

    def _free_run(self, plain_s: float, view: View, state: PlannerState) -> tuple[IntArray | None, float]:
        """Return what rows without a proposal run, as ``Plan.run``, and what of ``plain_s``, the time of a step, each such token saves."""
        most, correction = self.config.free_run_tokens, state.correction
        if most == 1:
            return None, 0.0
        turn_s = correction.item(VERIFY) * self.latency.turn_s + correction.item(OVERHEAD) * self.latency.overhead_s
        token_s = max(plain_s - turn_s, 0.0)
        wait_s = token_s if view.decoding + view.prefilling > 1 else 0.0
        tokens = free_run_tokens(turn_s, token_s, wait_s, self.config.margin, self.config.rest_steps, most)
        return np.full(len(view), tokens), turn_s - (turn_s + wait_s * (tokens > 1)) / tokens

    def _priced_choice(self, problem: Problem, prefill_s: float, view: View, state: PlannerState) -> Priced:
        """Return the choice and its price, starting from the last step's."""
        return priced_choice(problem, prefill_s, view, state.goodput, self.config.margin, state.promise.kept)

    def _may_look(self, state: PlannerState, found: Found) -> bool:
        """Return whether a probe may be looked for: its least price has been saved, and the last look was not just now.

        Each step earns ``explore_share`` of its time.
        """
        saved_s = found.credit_s * len(found.choice.length)
        return state.look == 0 and self.config.explore_share > 0 and saved_s >= PROBE_FLOOR * found.result.step_s

    def _looked(
        self,
        problem: StepProblem,
        view: View,
        rows: IntArray,
        expected: Expected,
        acceptance: AcceptanceState,
        price: float,
        found: Found,
        draws: Draws | None,
    ) -> Found:
        """Return the choice with a trial in it if one is affordable.

        Credit can always be saved up to the price of the cheapest probe, so that no draft stays out for good.
        """
        choice, result, _, credit_s, _ = found
        trial = self._explorer.trial(self._acceptance, acceptance, problem, view, rows, expected, choice, price, draws)
        probe = affordable(problem, trial, choice, result, price, credit_s) if trial is not None else None
        if probe is None:
            return found._replace(credit_s=min(credit_s, result.step_s), look=_LOOK_STEPS)
        if probe.rows:
            return Found(probe.choice, probe.result, probe.rows, credit_s - probe.cost_s, found.look)
        steps = (probe.cost_s - credit_s) / (self.config.explore_share * result.step_s)
        return found._replace(credit_s=min(credit_s, max(result.step_s, probe.cost_s)), look=min(max(int(steps), 0), _LOOK_STEPS))

    # -- observe

    def stand_by(self, view: View, state: PlannerState) -> PlannerState:
        """Return the state before a step that another plans: its acceptance and times are learnt."""
        return replace(state, view=view, planned=True, trial_s=0.0, promise=replace(state.promise, seconds=0.0))

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn acceptance (chosen drafts and counterfactuals), and correct the latency model."""
        learning_s = averaged(state.learning_s, outcome.parts_s.get("learning", 0.0)) if state.behind else state.learning_s
        if not state.planned and len(outcome.request):
            after = replace(state, unlearnt=(*state.unlearnt, outcome), learning_s=learning_s)
        else:
            after = replace(state, acceptance=self._learnt(state, now, outcome), unlearnt=(), learning_s=learning_s)
        if state.view is not None and len(outcome.request) and (state.planned or state.kept is None or not state.kept.steps % _TIMED_STEPS):
            after.correction, after.target_shape = self._timed(outcome, state, state.view)
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
        chains = [(o.request, o.draft, o.rule, o.accepted, o.scored) for o in steps]
        for outcome in steps:
            if len(outcome.free_request):
                rules = dict(zip(outcome.request.tolist(), outcome.rule.tolist(), strict=True))
                free_rule = np.array([rules.get(r, 0) for r in outcome.free_request.tolist()])
                chains.append((outcome.free_request, outcome.free_draft, free_rule, outcome.free_accepted, outcome.free_scored))
        request, draft, rule, accepted, scored = map(np.concatenate, zip(*chains, strict=True))
        emitted = np.concatenate([o.emitted for o in steps])
        acceptance = self._acceptance.observe(acceptance, request, draft, rule, accepted, scored, emitted)
        return self._acceptance.forget(acceptance, itertools.chain.from_iterable(o.finished.tolist() for o in steps))

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


def ready_rows(view: View) -> IntArray:
    """Return the rows that a choice is made for, by request: the batch's order makes no difference, not even among rows wholly alike."""
    rows: IntArray = view.request.argsort()
    return rows.compress(view.ready.take(rows))


def _split(view: View, rows: IntArray, hazard: FloatArray) -> tuple[Given, BoolArray | None]:
    """Return what is given of these rows, and which of them are the planner's own (None: all)."""
    own, choice = np.ones(len(view), np.bool_), no_speculation(len(view))
    for plan, others in ((view.given, view.control), (view.flying, ~view.ready)):
        if plan is not None and others is not None:
            own &= ~others
            choice.draft[others], choice.length[others] = plan.draft[others], plan.length[others]
    own = own[rows]
    if own.all():
        return NOTHING_GIVEN, None
    theirs = rows[~own]
    return Given.of(view, theirs, Choice(choice.draft[theirs], choice.length[theirs]), hazard[~own]), own


def _scattered(choice: Choice, rows: IntArray, n: int) -> Choice:
    """Return the choice of some rows as one of all, the others doing nothing."""
    whole = no_speculation(n)
    whole.draft[rows], whole.length[rows] = choice
    return whole


def _accepted(problem: StepProblem, choice: Choice, view: View, rows: IntArray) -> FloatArray:
    """Return what ``keeping.OfMany.accepted`` is of a choice for some rows of a view."""
    used = choice.length.nonzero()[0]
    if not len(used):
        return _NONE_ACCEPTED
    accepted = np.zeros((len(problem.gain) + 1, len(view)))
    accepted[1:, rows[used]] = problem.value[:, choice.draft[used], used] / view.weight[rows[used]]
    return accepted


def _tokens(problem: StepProblem, weight: FloatArray, choice: Choice, value: float) -> float:
    """Return the expected emitted tokens of a choice, unweighted."""
    if not np.count_nonzero(weight != 1):
        return value
    rows = choice.length.nonzero()[0]
    gain = problem.gain[:, choice.draft[rows], rows]
    gain[np.arange(len(gain))[:, None] >= choice.length[rows]] = 0.0
    return float(len(weight) + (gain.sum(0) / weight[rows]).sum())
