"""The adaptive planner: from what was learnt and a price of time one joint choice per step, and a budget to explore."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .acceptance import AcceptanceState, Expected
from .free_runs import free_run_tokens
from .goodput import Choice, Score, StepProblem, no_speculation
from .hints import Last
from .keeping import Kept, OfMany, kept
from .latency import OVERHEAD, VERIFY, LatencyModel
from .learner import Learner
from .one_row import one_row
from .plan import BoolArray, Drafted, FloatArray, IntArray, Plan, View
from .planner_state import PlannerConfig, PlannerState
from .pricing import Priced, Problem, priced_choice, promised_gain
from .probing import PROBE_FLOOR, affordable
from .problem import NOTHING_GIVEN, Bounds, Given, chains_s, extra_prefill_s, step_problem
from .selection import THOMPSON, Draws, Explorer
from .shapes import CHAINS_ONLY
from .trim import trimmed

_LOOK_STEPS = 4  # at most, from one look for a probe that found none to be had to the next: looking takes time too
_NONE_ACCEPTED = np.zeros((1, 0))  # of a plan that does not speculate


class Found(NamedTuple):
    """A choice with its score and the rows that probe in it; what may still be spent on probes, and the steps until the next look."""

    choice: Choice
    result: Score
    probes: int
    credit_s: float
    look: int


class AdaptivePlanner(Learner):
    """Chooses (draft, length) for every ready row by the priced goodput of the whole batch; implements ``policy.plan.Policy``.

    What it learns, and how, is the ``Learner``'s. Its methods return new states and leave the given one alone.
    """

    keeps_chains = True

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        super().__init__(drafts, latency, config)
        self._explorer = Explorer(self.config.selection, self.config.optimism, self.config.catchup_scored)
        self._bounds = Bounds(self.config.k_max, self.config.switch_horizon_steps)

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

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: PlannerState) -> IntArray:
        """Verify the nodes that are worth their time at the plan's price (``policy.trim``)."""
        latency, whole = self.corrected(state), state.view or view
        aloft = 0 if whole.flying is None else _aloft(whole, whole.flying)
        return trimmed(latency, state.correction, state.calibration, view, plan, drafted, aloft)

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
        if isinstance(kept, OfMany) and plan.length.any() and (plan.length is not kept.plan.length or len(view) != kept.rows):
            plan = self._judged_anew(plan, view, state)
        if view.prefill_tokens:
            plan = replace(plan, predicted_s=plan.predicted_s + self._prefill_s(view, state, len(view)))
        after = replace(state, acceptance=acceptance, view=view, credit_s=credit_s, kept=kept, planned=False, behind=state.planned)
        return plan, after

    def _judged_anew(self, plan: Plan, view: View, state: PlannerState) -> Plan:
        """Return a kept plan, of which some is not to be had or for other rows, as predicted now; without speculation if that pays more."""
        latency, nothing = self.corrected(state), no_speculation(len(view))
        step_s = chains_s(latency, state.correction, view, Choice(plan.draft, plan.length))
        plain_s = chains_s(latency, state.correction, view, nothing)
        if plan.predicted_tokens * plain_s < promised_gain(1.0, self.config.margin, state.promise.kept) * len(view) * step_s:
            return replace(plan, draft=nothing.draft, length=nothing.length, predicted_s=plain_s, predicted_tokens=float(len(view)))
        return replace(plan, predicted_s=step_s)

    def _plan_one(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[Plan, PlannerState]:
        """Plan for a single row by plain numbers: what ``_plan_rows`` does, quicker."""
        hazard = self._acceptance.hazards(acceptance, [view.request.item()])[0].tolist()
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
        expected = self._acceptance.expected(acceptance, view.request[rows].tolist())
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
            calibration=self._calibrated(state),
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


def ready_rows(view: View) -> IntArray:
    """Return the rows that a choice is made for, by request: the batch's order makes no difference, not even among rows wholly alike."""
    rows: IntArray = view.request.argsort()
    return rows.compress(view.ready.take(rows))


def _aloft(view: View, flying: Plan) -> int:
    """Return the tokens of the rows in flight in the target's batch."""
    return int(np.count_nonzero(~view.ready) + flying.length[~view.ready].sum())


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
