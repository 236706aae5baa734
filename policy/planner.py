"""The adaptive planner: before every step one joint choice of drafts and lengths, by what was
learnt of acceptance and of times; after it, what the step taught.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .acceptance import NO_GROUP, AcceptanceConfig, AcceptanceModel, AcceptanceState, Expected
from .exploration import TRIAL_TOKENS, Hope, trial
from .extensions import Estimator, Execution
from .kept import MANY, Kept, most_steps
from .latency import OVERHEAD, Correction, LatencyModel, Predicted, Times
from .learned import Learnt, restored, saved
from .loops.compiling import compile_all
from .plan import (
    Drafted,
    FloatArray,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    Policy,
    StepRows,
    View,
)
from .problem import (
    NOTHING_GIVEN,
    Choice,
    Given,
    Score,
    StepProblem,
    extra_prefill_s,
    predicted_parts,
    step_problem,
)
from .search import Priced, best
from .tenants import NOBODY, Tenants, with_rows
from .trim import Calibration, Promise, trimmed

_LOOK_STEPS = 4  # from one look for a trial to the next: looking takes time too
_SURE_TOKENS = 20.0  # of a plan, for which each is taken to bring one node and what it promised
_MEMORY_TOKENS = 2000.0  # of plans, of which it is known how many nodes they brought
_MEMORY_PROMISED = 500.0  # expected tokens of new plans, of which it is known what held
_PLAIN_STEPS = 1.0, 4.0  # of evidence: below the first, steps are plain until there is the second
_TIMED_STEPS = 4  # of steps with a kept choice, which are alike, one in so many is timed


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Constants of the planner; raises ValueError naming the one that is out of range.

    ``k_max`` tokens are speculated at most. ``explore_share`` of the time goes into trials, which
    hope for ``optimism`` standard deviations; at 0 no step goes plain to be timed, either. A
    catch-up is spread over at most ``switch_horizon_steps``. Planning and learning may take
    ``planning_share`` of the time; where they take more, choices are kept. ``waiting_price``: the
    price of time counts those who wait for the step without a row in it (else plain V/T).
    ``catchup_scored``: engines report how a draft that catches up would have guessed what it reads.
    """

    k_max: int = 8
    explore_share: float = 0.005
    optimism: float = 1.5
    switch_horizon_steps: float = 16.0
    planning_share: float = 0.01
    waiting_price: bool = True
    catchup_scored: bool = False
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.explore_share < 1:
            raise ValueError(f"explore_share must be in [0, 1), got {self.explore_share}")
        if not self.k_max >= 0:
            raise ValueError(f"k_max must be >= 0, got {self.k_max}")
        for name in ("optimism", "switch_horizon_steps", "planning_share"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class PlannerState:
    """What the planner remembers from step to step.

    ``tenants`` are those that ``nodes``, ``brought``, ``held`` and ``held_share`` have a column
    for with each draft. ``nodes`` float64[2, columns]: how many nodes were verified, and tokens of
    the longest paths that were proposed (fading); ``brought`` float64[columns] how many nodes more
    than one such a token brings, by these. ``promise`` is what the last plan, if new, expected of
    its rows; ``held`` float64[2, columns]: the nodes of such plans that held, and those expected,
    where some were cut off (fading); ``held_share`` float64[columns] their ratio, by which gains
    count: what the trim cuts off is no token gained.
    ``view`` is the last one planned for, ``planned`` whether its plan was made anew; ``goodput`` of
    the batch then, in tokens per second without prefill (0: unknown). ``credit_s`` is saved for
    trials, ``look_s`` of it make the next look worth while. ``debt_s`` is what planning and
    learning took beyond their share; while there is any, plans are ``kept``, and their steps
    ``unlearnt`` until a plan is due. ``plain`` is whether steps go without speculation, to see
    their time.
    """

    acceptance: AcceptanceState
    correction: Correction
    calibration: Calibration
    nodes: FloatArray
    brought: FloatArray
    promise: Promise | None
    held: FloatArray
    held_share: FloatArray
    tenants: Tenants = field(default_factory=Tenants)
    view: View | None = None
    planned: bool = False
    goodput: float = 0.0
    credit_s: float = 0.0
    look_s: float = 0.0
    debt_s: float = 0.0
    kept: Kept | None = None
    plain: bool = False
    unlearnt: tuple[Outcome, ...] = ()


class AdaptivePlanner(Policy[PlannerState]):
    """Chooses for all rows by the priced goodput of the whole batch (``policy.plan.Policy``).

    All figures come from the outcomes and from ``latency``, which has one curve for each of the
    ``drafts``, in order: no clock, no files. ``execution`` tells what the engine does beyond one
    pass for all rows (None: nothing); ``estimator`` replaces how acceptance is learnt.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        config: PlannerConfig | None = None,
        execution: Execution | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        if len(latency.drafts) != len(drafts):
            names = f"one curve for each of the drafts {drafts}"
            raise ValueError(f"latency must have {names}, got {len(latency.drafts)}")
        self.drafts, self.latency, self.execution = tuple(drafts), latency, execution
        self.config = config or PlannerConfig()
        size = len(drafts), self.config.k_max
        own = AcceptanceModel(*size, self.config.acceptance)
        self.estimator: Estimator = own if estimator is None else estimator
        compile_all()
        self._parts = ("verify", "overhead", *(f"draft:{name}" for name in drafts))

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        drafts = len(self.drafts)
        return PlannerState(
            acceptance=self.estimator.start(),
            correction=Correction.start(drafts),
            calibration=Calibration.none(drafts),
            nodes=np.zeros((2, drafts)),
            brought=np.zeros(drafts),
            promise=None,
            held=np.zeros((2, drafts)),
            held_share=np.ones(drafts),
        )

    # -- before a step

    def plan(
        self, view: View, state: PlannerState, now: float, rng: np.random.Generator
    ) -> tuple[Plan, PlannerState]:
        """Choose for the rows, whatever their order.

        Raises ValueError for a view with other drafts than the planner's.
        """
        del rng
        if view.drafts != self.drafts:
            raise ValueError(f"view.drafts must be {self.drafts}, got {view.drafts}")
        kept = state.kept.plan(view) if state.kept is not None and state.debt_s > 0 else None
        return self._anew(view, state, now) if kept is None else self._again(kept, view, state)

    def _again(self, plan: Plan, view: View, state: PlannerState) -> tuple[Plan, PlannerState]:
        """Return a kept plan for a view, and the state: who has come is known from now on."""
        if view.prefill_tokens:
            plan.predicted_s += extra_prefill_s(self.times(state, len(view)), view, len(view))
        credit_s = state.credit_s + self.config.explore_share * plan.predicted_s
        return plan, replace(
            self._admitted(state, view),
            view=view,
            planned=False,
            credit_s=credit_s,
            promise=None,
        )

    def _anew(self, view: View, state: PlannerState, now: float) -> tuple[Plan, PlannerState]:
        """Return a new plan: what the step can be, the best of it at the price of time, a trial."""
        config = self.config
        after = self.admitted(view, state, now)
        after.view, after.planned = view, True
        times = self.times(state, len(view))
        problem, rows, expected, given = self.problem(view, after, times)
        prefill_s = extra_prefill_s(times, view, len(rows) + len(given.rows) + given.tokens)
        waiting = 1 + view.prefilling / max(len(view), 1)
        priced = best(
            problem,
            known=state.goodput,
            waiting=waiting if config.waiting_price else 1.0,
            prefill_s=prefill_s if config.waiting_price else 0.0,
        )
        plan = _whole(view, rows, priced.choice, priced.result, priced.price)
        plan.notes["credit_s"] = state.credit_s
        if problem.base_value:
            plain_s = problem.plain_s - prefill_s
            plan.notes["gain"] = priced.goodput * plain_s / problem.base_value
        evidence = state.correction.evidence(len(view) + view.prefill_tokens)
        missed = evidence < _PLAIN_STEPS[state.plain]
        after.plain = missed and config.explore_share > 0 and not len(given.rows)
        if after.plain and plan.length.any():
            return self._plainly(plan, problem, after), after
        after.promise = Promise.of(
            problem,
            priced.choice,
            view.request.take(rows),
            after.tenants.of(view.request.take(rows).tolist()),
            after.held_share,
        )
        after.goodput, after.kept = priced.goodput, self._kept(plan, prefill_s, view, state)
        after.credit_s += config.explore_share * plan.predicted_s
        if config.explore_share and after.credit_s >= after.look_s and problem.gain.size:
            plan = self._explored(plan, problem, priced, rows, expected, after)
        return plan, after

    @staticmethod
    def _plainly(plan: Plan, problem: StepProblem, after: PlannerState) -> Plan:
        """Return a plan without speculation instead of a plan: its time is not known. Where steps
        always speculate, what they take longer than their table would be believed of all.
        """
        after.promise = after.kept = None
        plain = Plan.nothing(len(plan.length))
        plain.predicted_s, plain.predicted_tokens = problem.plain_s, problem.base_value
        plain.price, plain.notes = plan.price, plan.notes | {"trial": len(plan.length)}
        return plain

    def _explored(
        self,
        plan: Plan,
        problem: StepProblem,
        priced: Priced,
        rows: IntArray,
        expected: Expected,
        after: PlannerState,
    ) -> Plan:
        """Return the plan with a trial in it, where one is afforded; ``after`` has paid for it, in
        place, and knows when the next look is worth while.
        """
        assert after.view is not None
        view, step_s = after.view, plan.predicted_s
        hope = self._hope(after.acceptance, view, rows, expected)
        found = trial(problem, hope, *priced[:3], after.credit_s)
        earned_s = _LOOK_STEPS * self.config.explore_share * step_s
        if found is None or not found.rows:
            most_s = step_s if found is None else max(found.cost_s, step_s)
            after.credit_s = min(after.credit_s, most_s)
            after.look_s = after.credit_s + earned_s
            return plan
        after.credit_s -= found.cost_s
        after.promise = None
        after.look_s = after.credit_s + earned_s
        tried = _whole(view, rows, found.choice, found.result, plan.price)
        tried.notes = plan.notes | {"trial": found.rows}
        return tried

    def problem(
        self, view: View, state: PlannerState, times: Times | None = None
    ) -> tuple[StepProblem, IntArray, Expected, Given]:
        """Return the choice that the planner has in a view, its rows of the view, what is expected
        of them, and what is given beside. Every request has been admitted.

        Rows are by request: the batch's order makes no difference, not even among rows alike.
        """
        rows: IntArray = view.request.argsort()
        given = NOTHING_GIVEN
        choices, theirs = view.control_plan, view.control
        if choices is not None and theirs is not None:
            others, rows = rows[theirs[rows]], rows[~theirs[rows]]
            hazard = self.estimator.expected(state.acceptance, view.request[others].tolist()).hazard
            choice = Choice(choices.draft[others], choices.length[others])
            given = Given.of(others, choice, hazard)
        expected = self.estimator.expected(state.acceptance, view.request.take(rows).tolist())
        times = times or self.times(state, len(view))
        limits = self.config.k_max, self.config.switch_horizon_steps
        problem = step_problem(times, view, rows, expected.hazard, given, *limits)
        self._by_tenant(problem, view, rows, state)
        if self.execution is not None:
            self.execution.prepare(problem, view, times)
        return problem, rows, expected, given

    def admitted(self, view: View, state: PlannerState, now: float) -> PlannerState:
        """Return the state at a time, with a place for the requests of a view."""
        return self._admitted(self._learnt(state, now), view)

    def _by_tenant(
        self, problem: StepProblem, view: View, rows: IntArray, state: PlannerState
    ) -> None:
        """Let gains and costs of rows be those that their tenants have seen, in place."""
        if state.tenants.rows == 1:
            problem.gain *= state.held_share[:, None]
            return
        tenant = state.tenants.of(view.request.take(rows).tolist())
        share, brought = (
            column.reshape(state.tenants.rows, -1)[tenant].T
            for column in (state.held_share, state.brought)
        )
        problem.gain *= share
        row_s, context_s = self._drafting_s(state, len(view), brought.T)
        problem.draft_row_s = row_s.T + context_s.T * view.context.take(rows)

    def times(self, state: PlannerState, rows: int) -> Times:
        """Return the corrected seconds of a step, drafting charged for the nodes that it brings.

        A plan counts a proposed token as one node; how many the trim verifies for it is learnt by
        draft (of several tenants: their mean). A node's seconds are the mean of the next four of
        each of the rows, and those by cached token before it.
        """
        times = state.correction.times(self.latency)
        brought = state.brought
        if state.tenants.rows > 1:
            brought = brought.reshape(state.tenants.rows, -1).mean(0)
        times.draft_row_s, times.draft_context_s = self._drafting_s(state, rows, brought)
        return times

    def _drafting_s(
        self, state: PlannerState, rows: int, brought: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of a drafts' forward by row and by cached token of it, with those of
        the nodes that it brings, as ``brought`` [..., drafts].
        """
        times = state.correction.times(self.latency)
        node_s = (times.verify_at(5 * rows) - times.verify_at(rows)) / max(4 * rows, 1)
        row_s = np.maximum(times.draft_row_s + node_s * brought, 0.0)
        return row_s, times.draft_context_s + times.node_context_s * (1 + brought)

    def needs_offers(self, request: IntArray, state: PlannerState) -> bool:
        """Return False where a plan without speculation is kept for these requests."""
        if state.debt_s <= 0 or state.kept is None or not state.kept.lasts(len(request)):
            return True
        plan = state.kept.plans.get(b"")
        return plan is None or bool(plan.length.any())

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: PlannerState) -> IntArray:
        """Verify the nodes that are worth their time at the plan's price (``policy.trim``)."""
        times = state.correction.times(self.latency)
        if state.tenants.rows > 1:
            tenant = state.tenants.of(view.request.tolist())
            column = tenant[drafted.row] * len(self.drafts) + drafted.draft
            drafted = replace(drafted, draft=column)
        return trimmed(times, state.calibration, view, plan, drafted)

    def _admitted(self, state: PlannerState, view: View) -> PlannerState:
        """Return the state with a place for all requests that share the step."""
        request, group, tenant = view.request, view.group, view.tenant
        tenant = np.zeros(len(request), np.int64) if tenant is None else tenant
        if group is not None:  # requests of two tenants are never of one group
            group = np.where(group == NO_GROUP, group, group ^ tenant)
        requests, most = request.tolist(), self.config.acceptance.most_tenants
        tenants, emptied = state.tenants.admitted(requests, tenant.tolist(), most)
        after = state
        if emptied or tenants.rows != state.tenants.rows:
            after = self._with_tenants(state, tenants.rows, emptied)
        acceptance = self.estimator.admit(
            after.acceptance,
            requests,
            None if group is None else group.tolist(),
            tenants.of(requests) if tenants.rows > 1 else None,
        )
        if acceptance is after.acceptance and tenants is after.tenants:
            return after
        return replace(after, tenants=tenants, acceptance=acceptance)

    def _with_tenants(self, state: PlannerState, tenants: int, emptied: list[int]) -> PlannerState:
        """Return the state with so many rows of tenants, of which ``emptied`` have seen nothing."""
        before = state.tenants.rows
        nodes, held = (
            with_rows(counts.T, before, tenants, emptied).T for counts in (state.nodes, state.held)
        )
        return replace(
            state,
            acceptance=self.estimator.with_tenants(state.acceptance, tenants, emptied),
            calibration=state.calibration.with_tenants(before, tenants, emptied),
            nodes=nodes,
            brought=_ratio(nodes) - 1,
            held=held,
            held_share=_ratio(held),
        )

    def _kept(self, plan: Plan, prefill_s: float, view: View, state: PlannerState) -> Kept | None:
        """Return what is kept of a plan."""
        rests = len(view) >= MANY and not plan.length.any()
        if not rests and (self.execution is not None or view.prefill_tokens):
            return None  # beside a prompt, tokens cost little
        before, request, plans = state.kept, view.request.tobytes(), {Kept.key(view): plan}
        if before is not None and before.request == request and state.debt_s > 0:
            plans = {**before.plans, **plans}
        return Kept(request, len(view), plans, Kept.drafts_found(view).tobytes(), prefill_s)

    def _hope(
        self, acceptance: AcceptanceState, view: View, rows: IntArray, expected: Expected
    ) -> Hope:
        """Return what optimism expects of the rows.

        A draft that catches up reads tokens emitted without it, and knows of each whether it
        would have guessed it.
        """
        spread, variance = self.estimator.doubt(acceptance, expected)
        tokens: Any = TRIAL_TOKENS
        if self.config.catchup_scored:
            tokens = TRIAL_TOKENS + np.minimum(view.catchup[rows].T - 1, expected.emitted)
        hazard = expected.hazard
        evidence = variance * tokens * hazard[0] * (1 - hazard[0])
        hoped = np.minimum(hazard + self.config.optimism * spread, 1.0)
        return Hope(hoped, self.config.optimism, evidence / (1 + evidence))

    # -- after a step

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn acceptance, times and what confidences are worth; of steps with a kept plan all at
        once when a plan is due.
        """
        rows = outcome.rows
        if state.planned or not len(rows):
            after = self._learnt(state, now, outcome)
        else:
            after = replace(state, unlearnt=(*state.unlearnt, outcome))
        timed = state.planned or not len(state.unlearnt) % _TIMED_STEPS
        if state.view is not None and len(rows) and timed:
            after.correction = self._timed(outcome, state, state.view)
        column = self._column(rows, state.tenants)
        used = column >= 0
        if used.any():
            both, columns = (rows.verified[used], rows.length[used]), len(state.brought)
            new = [np.bincount(column[used], counts, columns) for counts in both]
            after.nodes = state.nodes * np.exp(-new[1] / _MEMORY_TOKENS) + np.array(new)
            after.brought = _ratio(after.nodes) - 1
            if state.promise is not None and len(rows.followed):
                held = state.promise.held(rows, columns)
                after.held = state.held * np.exp(-held[1] / _MEMORY_PROMISED) + held
                after.held_share = _ratio(after.held)
        after.debt_s = self._debt_s(outcome, state)
        return after

    def _debt_s(self, outcome: Outcome, state: PlannerState) -> float:
        """Return ``PlannerState.debt_s`` after a step, so much that it is paid off in some steps.

        A kept plan takes next to nothing; the time of learning is the last step's.
        """
        parts_s = outcome.times.parts_s
        earned_s = self.config.planning_share * outcome.times.measured_s
        debt_s = state.debt_s - earned_s
        if state.planned:
            debt_s += parts_s.get("planning", 0.0)
        if not state.unlearnt:
            debt_s += parts_s.get("learning", 0.0)
        most_s = most_steps(len(outcome.rows)) * earned_s
        return min(max(debt_s, 0.0), most_s)

    def stand_by(self, view: View, state: PlannerState) -> PlannerState:
        """Return the state before a step that another plans; what it shows is learnt, at once or,
        where learning would take more than its share of the time, with later steps.
        """
        return replace(state, view=view, planned=state.debt_s <= 0)

    def drift(self, state: PlannerState) -> dict[str, float]:
        """Return measured over predicted time by part of the step; 1: the tables still hold."""
        return dict(zip(self._parts, state.correction.factor.tolist(), strict=True))

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, without the requests in flight (``policy.learned``)."""
        if not isinstance(self.estimator, AcceptanceModel):
            return {}
        return saved(
            _known(self._learnt(state, now) if state.unlearnt else state), self.drafts, now
        )

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the state of what was saved ``idle_s`` ago. Raises LearnedError."""
        start = self.start()
        if not isinstance(self.estimator, AcceptanceModel):
            return start
        known = restored(data, _known(start), self.drafts, self.estimator, now, idle_s)
        return replace(self._with_tenants(start, known.tenants.rows, []), **known._asdict())

    def _column(self, rows: StepRows, tenants: Tenants) -> IntArray:
        """Return by row the column of its tenant and draft, NOBODY where there is none."""
        tenant = tenants.of(rows.request.tolist())
        column = tenant * len(self.drafts) + rows.draft
        return np.where((tenant >= 0) & (rows.draft >= 0), column, NOBODY)

    def _learnt(self, state: PlannerState, now: float, *outcomes: Outcome) -> PlannerState:
        """Return the state after the steps that were not learnt from, and these."""
        acceptance, calibration = self.estimator.aged(state.acceptance, now), state.calibration
        tenants = state.tenants
        if steps := (*state.unlearnt, *outcomes):
            free = [o.free for o in steps if len(o.free)]
            tables: list[StepRows | FreeChains] = [*(o.rows for o in steps), *free]
            chains = [(one.request, one.draft, one.accepted, one.scored) for one in tables]
            emitted = np.concatenate([o.rows.emitted for o in steps])
            columns = [np.concatenate(column) for column in zip(*chains, strict=True)]
            request, draft, accepted, scored = columns
            acceptance = self.estimator.observe(
                acceptance, request, draft, accepted, scored, emitted
            )
            over = list(itertools.chain.from_iterable(o.finished.tolist() for o in steps))
            acceptance = self.estimator.forget(acceptance, over)
            nodes = [
                (
                    self._column(o.rows, tenants)[o.nodes.row],
                    o.nodes.drawn,
                    o.nodes.confidence,
                    o.nodes.accepted,
                )
                for o in steps
                if len(o.nodes)
            ]
            if nodes:
                column, *rest = map(np.concatenate, zip(*nodes, strict=True))
                known = column >= 0
                calibration = calibration.learnt(column[known], *(c[known] for c in rest))
            tenants = tenants.without(over)
        return replace(
            state,
            acceptance=acceptance,
            calibration=calibration,
            tenants=tenants,
            unlearnt=(),
        )

    def _timed(self, outcome: Outcome, state: PlannerState, view: View) -> Correction:
        """Return the correction after the step's time is held against what the model says of it.

        Planning and learning are in no prediction. An engine that times nothing but the whole: all
        parts share its surprise, which shows no shape.
        """
        parts_s, correction = outcome.times.parts_s, state.correction
        plain = Correction.start(len(self.drafts)).times(self.latency)
        predicted = self.predicted(plain, outcome, view)
        measured_s = np.array([parts_s.get(name, 0.0) for name in self._parts])
        own_s = parts_s.get("planning", 0.0) + parts_s.get("learning", 0.0)
        measured_s[OVERHEAD] = max(measured_s[OVERHEAD] - own_s, 0.0)
        return correction.learnt(predicted, measured_s, outcome.times.measured_s)

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds by part that a step should have taken as it was executed."""
        executed = self.execution.predicted if self.execution is not None else predicted_parts
        return executed(times, outcome, view)


def _known(state: PlannerState) -> Learnt:
    return Learnt(state.acceptance, state.calibration, state.correction, state.tenants)


def _ratio(counts: FloatArray) -> FloatArray:
    """Return the first over the second of counts [2, columns], shrunk towards 1."""
    one, other = counts + _SURE_TOKENS
    ratio: FloatArray = one / other
    return ratio


def _whole(view: View, rows: IntArray, choice: Choice, result: Score, price: float) -> Plan:
    """Return the plan of a choice for some rows of a view, the others doing nothing."""
    plan = Plan.nothing(len(view))
    plan.draft[rows], plan.length[rows] = choice
    plan.predicted_s, plan.predicted_tokens, plan.price = result.step_s, result.value, price
    return plan
