"""The adaptive planner: acceptance estimates, measured times and a price of time, one joint choice per step, and a budget to explore."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .acceptance import AcceptanceConfig, AcceptanceModel, AcceptanceState, Estimate
from .goodput import Choice, Score, StepProblem, best_choice, no_speculation, score
from .latency import OVERHEAD, VERIFY, LatencyModel, corrected, correction_by_part
from .learned import restored, saved
from .plan import NO_DRAFT, FloatArray, IntArray, Outcome, Plan, View
from .problem import NOTHING_GIVEN, Bounds, Given, expected_tokens, extra_prefill_s, predicted_parts, step_problem

_COLD_TOLERANCE, _WARM_TOLERANCE = 0.01, 0.02  # of the price, whose error costs in second order; the next step goes on
_PRICE_ROUNDS = 4
_SHARE_BOUNDS = (0.1, 2.0)
_REST_ROWS = 4
_PROBE_TOKENS = 2
_PROBE_FLOOR = 0.1  # of a step's time: what a probe costs at least, since estimates flatter what looks free


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Constants of the planner; raises ValueError naming the one that is out of range.

    ``explore_share`` is the share of step time that probes may cost; ``optimism`` how many standard deviations a probe hopes for;
    ``switch_horizon_steps`` the most steps over which a catch-up is spread; ``price_memory_steps`` the memory of the long-run goodput.
    ``margin`` is the gain in goodput that speculation must promise: of many estimates the best is flattered, and a loss weighs more than
    a gain missed. A batch that does not speculate is planned for again after ``rest_steps`` steps, for planning costs it time too.
    """

    k_max: int = 8
    explore_share: float = 0.005
    optimism: float = 1.5
    switch_horizon_steps: float = 16.0
    price_memory_steps: float = 200.0
    margin: float = 0.03
    rest_steps: int = 4
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.k_max < 0:
            raise ValueError(f"k_max must be >= 0, got {self.k_max}")
        if not 0 <= self.explore_share < 1:
            raise ValueError(f"explore_share must be in [0, 1), got {self.explore_share}")
        for name in ("margin", "rest_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("optimism", "switch_horizon_steps", "price_memory_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannerState:
    """What the planner remembers. ``correction`` as in ``policy.latency``; ``view`` the last one planned for.

    ``goodput`` is the best goodput of the last batch without its prefill (tokens per second of the model's time; 0: unknown). ``earned``
    and ``expected`` are fading means of emitted tokens and of goodput x predicted time: their ratio is the share of the best goodput that
    is realised in the long run, prefill included. ``saturated`` is the long-run goodput of steps with a backlog (0 = none seen).
    ``credit_s`` is what may still be spent on probes, ``rest`` the steps for which no speculation stays decided.
    """

    acceptance: AcceptanceState
    correction: FloatArray
    view: View | None = None
    goodput: float = 0.0
    earned: float = 1.0
    expected: float = 1.0
    saturated: float = 0.0
    credit_s: float = 0.0
    rest: int = 0


class AdaptivePlanner:
    """Chooses (draft, length) for every ready row by the priced goodput of the whole batch; implements ``policy.plan.Policy``.

    ``latency`` has one curve per name in ``drafts``, in that order. All figures come from it and from the outcomes: no clock, no files.
    """

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        if len(latency.drafts) != len(drafts):
            raise ValueError(f"latency must have one curve for each of the drafts {drafts}, got {len(latency.drafts)}")
        self.drafts = tuple(drafts)
        self.config = config or PlannerConfig()
        self._latency = latency
        self._bounds = Bounds(self.config.k_max, self.config.switch_horizon_steps)
        self._acceptance = AcceptanceModel(len(drafts), self.config.k_max, self.config.acceptance)

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        return PlannerState(self._acceptance.start(), self._latency.start())

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, without the requests in flight (see ``policy.learned``)."""
        return saved(state, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the state of what was saved ``idle_s`` ago. Raises LearnedError naming field and value."""
        return restored(data, self.start(), self._acceptance, now, idle_s)

    def drift(self, state: PlannerState) -> dict[str, float]:
        """Return measured over predicted time by part of the step, for metrics; 1 = the latency tables still hold."""
        return correction_by_part(state.correction, self.drafts)

    # -- plan

    def plan(self, view: View, state: PlannerState, now: float, rng: np.random.Generator) -> tuple[Plan, PlannerState]:
        """Choose for the ready rows; the others get no draft. Raises ValueError for a view with other drafts than the planner's."""
        del rng  # exploration is budgeted and aimed, not random
        if view.drafts != self.drafts:
            raise ValueError(f"view.drafts must be {self.drafts}, got {view.drafts}")
        if state.rest and _same_batch(view, state.view):
            return self._rest(view, state)
        rows = np.flatnonzero(view.ready)
        requests: list[int] = view.request[rows].tolist()
        acceptance = self._acceptance.admit(self._acceptance.aged(state.acceptance, now), requests)
        estimate = self._acceptance.estimate(acceptance, requests, view.rule[rows])
        given, rows, estimate = _split(view, rows, estimate)
        problem = step_problem(self._latency, state.correction, view, rows, estimate.hazard, given, self._bounds)
        prefill_s = extra_prefill_s(self._latency, state.correction, view, len(requests) + given.tokens)
        choice, result, price, goodput = self._priced_choice(problem, prefill_s, view.queued, state)
        choice, result, credit_s, probed = self._explore(problem, view, rows, estimate, choice, result, price, state.credit_s)
        draft, length = np.full(len(view), NO_DRAFT, np.int64), np.zeros(len(view), np.int64)
        draft[rows], length[rows] = choice
        notes = {"probe": probed, "realised_share": state.earned / state.expected, "credit_s": credit_s}
        if problem.base_value:
            notes["gain"] = goodput * float(problem.verify_s[0] - prefill_s) / problem.base_value  # over not speculating
        plan = Plan(draft, length, result.step_s, expected_tokens(estimate.hazard, choice) + given.expected_tokens, price, notes)
        rest = 0 if length.any() else self.config.rest_steps
        return plan, replace(state, acceptance=acceptance, view=view, goodput=goodput, credit_s=credit_s, rest=rest)

    def _rest(self, view: View, state: PlannerState) -> tuple[Plan, PlannerState]:
        """Return the plan of not speculating for a batch that has just been found to gain nothing by it."""
        n, correction = len(view), state.correction
        verify_s = correction[VERIFY] * self._latency.target.seconds(n, n, int(view.context.sum()))
        step_s = float(verify_s + correction[OVERHEAD] * self._latency.overhead_s)
        credit_s = state.credit_s + self.config.explore_share * step_s
        plan = Plan(np.full(n, NO_DRAFT, np.int64), np.zeros(n, np.int64), step_s, float(n), notes={"rest": state.rest})
        return plan, replace(state, view=view, credit_s=credit_s, rest=state.rest - 1)

    def _priced_choice(
        self, problem: StepProblem, prefill_s: float, queued: int, state: PlannerState
    ) -> tuple[Choice, Score, float, float]:
        """Return the choice, its score, the price of time and the batch's goodput without prefill.

        Dinkelbach's iteration (1967) finds the goodput that prices itself, starting from the last step's; the long-run price is the
        realised share of it, and with a backlog at least the goodput of saturated steps, since a second saved goes to those that wait.
        Keeping the share rather than the goodput itself lets the price follow the batch size at once.
        """
        rows = len(problem.gain)
        if rows == 0:
            nothing = no_speculation(0)
            goodput = problem.base_value / float(problem.verify_s[0] - prefill_s) if problem.base_value else state.goodput
            return nothing, score(problem, nothing), 0.0, goodput
        share = min(max(state.earned / state.expected, _SHARE_BOUNDS[0]), _SHARE_BOUNDS[1])
        floor = state.saturated if queued else 0.0
        tolerance = _WARM_TOLERANCE if state.goodput else _COLD_TOLERANCE
        goodput = state.goodput or problem.base_value / float(problem.verify_s[0] - prefill_s)
        for _ in range(_PRICE_ROUNDS):
            price = max(share * goodput, floor)
            choice, result = best_choice(problem, price)
            previous, goodput = goodput, result.value / (result.charged_s - prefill_s)
            if abs(goodput - previous) <= tolerance * previous:
                break
        plain = problem.base_value / float(problem.verify_s[0] - prefill_s)
        if choice.length.any() and goodput < (1 + self.config.margin) * plain:
            choice, goodput = no_speculation(rows), plain
            result = score(problem, choice)
        return choice, result, price, goodput

    # -- explore

    def _explore(
        self,
        problem: StepProblem,
        view: View,
        rows: IntArray,
        estimate: Estimate,
        choice: Choice,
        result: Score,
        price: float,
        credit_s: float,
    ) -> tuple[Choice, Score, float, int]:
        """Return (choice, score, credit, probed rows): the choice with some rows on the draft that optimism favours most, if affordable.

        Each step earns ``explore_share`` of its time; a probe costs what the objective loses by it at mean estimates, whole catch-up
        included. Credit can always be saved up to the price of the cheapest probe, so that no draft stays out for good.
        """
        credit_s += self.config.explore_share * result.step_s
        if credit_s < _PROBE_FLOOR * result.step_s:
            return choice, result, credit_s, 0
        probe = self._probe(problem, view.weight[rows], estimate, choice, price)
        if probe is None:
            return choice, result, min(credit_s, result.step_s), 0
        order, draft, length = probe
        cap_s = result.step_s
        for count in sorted({max(1, len(order) // 2), max(1, len(order) // 8), 1}, reverse=True):
            chosen = order[:count]
            candidate = Choice(choice.draft.copy(), choice.length.copy())
            candidate.draft[chosen], candidate.length[chosen] = draft, length[chosen]
            outcome = score(problem, candidate)
            loss_s = max(_PROBE_FLOOR * result.step_s, (result.value - outcome.value) / price + outcome.step_s - result.step_s)
            if loss_s <= credit_s and outcome.step_s <= problem.limit_s:
                return candidate, outcome, credit_s - loss_s, count
            cap_s = max(result.step_s, loss_s)
        return choice, result, min(credit_s, cap_s), 0

    def _probe(
        self, problem: StepProblem, weight: FloatArray, estimate: Estimate, choice: Choice, price: float
    ) -> tuple[IntArray, int, IntArray] | None:
        """Return (rows in order of promise, draft, length by row) of a probe, or None if even optimism sees no gain.

        The upside of (row, draft) is its best optimistic net gain over the row's present one, the draft's forwards shared by all rows (it
        may pay only if all use it). The draft of the largest upside is probed, on the rows of the most upside by cost, at most
        ``_PROBE_TOKENS`` beyond the chain that the row has with that draft.
        """
        n, drafts, k_max = problem.gain.shape
        if k_max == 0 or n == 0 or self.config.explore_share == 0:
            return None
        hopeful = np.minimum(estimate.hazard + self.config.optimism * estimate.spread, 1.0)[:, :, :k_max]
        token_s = (problem.verify_s[-1] - problem.verify_s[0]) / (len(problem.verify_s) - 1)
        shared = price * (token_s + problem.forward_s[:, n] / n + problem.row_s)
        depth = np.arange(1, k_max + 1)
        net = np.cumsum(np.cumprod(hopeful, axis=2), axis=2) * weight[:, None, None] - depth * shared[:, :, None]
        net = np.where(depth <= problem.ceiling[:, :, None], net, -np.inf) - price * problem.charge_s[:, :, None]
        present = np.cumsum(problem.gain, axis=2)[np.arange(n), choice.draft, choice.length - 1]
        present = np.where(choice.length > 0, present - choice.length * shared[np.arange(n), choice.draft], 0.0)
        own_length = np.where(choice.draft[:, None] == np.arange(drafts), choice.length[:, None], 0)
        length = np.minimum(net.argmax(2) + 1, own_length + _PROBE_TOKENS)
        upside = np.where(length == own_length, 0.0, np.maximum(net.max(2) - present[:, None], 0.0))
        draft = int(upside.sum(0).argmax())
        promise = upside[:, draft] / (problem.forward_s[draft, 1] + problem.switch_s[:, draft] + 1e-9)
        order = np.argsort(-promise, kind="stable")
        order = order[promise[order] > 0]
        return (order, draft, length[:, draft]) if len(order) else None

    # -- observe

    def stand_by(self, view: View, state: PlannerState) -> PlannerState:
        """Return the state before a step that another plans: its acceptance and times are learnt, its goodput is not the planner's."""
        return replace(state, view=view, goodput=0.0)

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn acceptance (chosen drafts and counterfactuals), correct the latency model, and follow the long-run goodput."""
        model = self._acceptance
        acceptance = model.aged(state.acceptance, now)
        classes = dict(zip(outcome.request.tolist(), outcome.rule.tolist(), strict=True))
        free_rule = np.array([classes.get(r, 0) for r in outcome.free_request.tolist()], np.int64)
        acceptance = model.observe(
            acceptance,
            np.concatenate([outcome.request, outcome.free_request]),
            np.concatenate([outcome.draft, outcome.free_draft]),
            np.concatenate([outcome.rule, free_rule]),
            np.concatenate([outcome.accepted, outcome.free_accepted]),
            np.concatenate([outcome.scored, outcome.free_scored]),
            outcome.request,
        )
        state = replace(state, acceptance=model.forget(acceptance, outcome.finished.tolist()))
        return self._timed(outcome, state) if state.view is not None and len(outcome.request) else state

    def _timed(self, outcome: Outcome, state: PlannerState) -> PlannerState:
        """Compare the step with what the model says of it as it was executed."""
        assert state.view is not None
        predicted_s, weight = predicted_parts(self._latency, outcome, state.view)
        names = list(correction_by_part(state.correction, self.drafts))
        measured_s = np.array([outcome.parts_s.get(name, 0.0) for name in names])
        if not measured_s.any():  # an engine that times nothing but the whole: all parts share its surprise
            whole_s = float((predicted_s * state.correction).sum())
            measured_s = predicted_s * state.correction * (outcome.measured_s / whole_s if whole_s > 0 else 0.0)
        keep = math.exp(-1 / self.config.price_memory_steps)
        tokens = float((weight * outcome.emitted).sum())
        step_s = float((predicted_s * state.correction).sum())
        correction = corrected(state.correction, predicted_s, measured_s)
        if not state.goodput:
            return replace(state, correction=correction)
        saturated = state.saturated
        if state.view.queued and step_s > 0:
            saturated = keep * saturated + (1 - keep) * tokens / step_s if saturated else tokens / step_s
        return replace(
            state,
            correction=correction,
            earned=keep * state.earned + (1 - keep) * tokens,
            expected=keep * state.expected + (1 - keep) * state.goodput * step_s,
            saturated=saturated,
        )


def _same_batch(view: View, before: View | None) -> bool:
    """Return whether the same requests go on, all ready and without prefill beside them.

    A small batch never counts as the same: planning for it is cheap, and a match that lookup has just found may be half of its tokens.
    Nor does one of two arms, whose given rows may speculate.
    """
    if before is None or len(view) < _REST_ROWS or view.given is not None:
        return False
    return not view.prefill_tokens and bool(view.ready.all()) and np.array_equal(view.request, before.request)


def _split(view: View, rows: IntArray, estimate: Estimate) -> tuple[Given, IntArray, Estimate]:
    """Return what is given of the ready rows, and the rows that are the planner's with their estimates."""
    if view.given is None or view.control is None:
        return NOTHING_GIVEN, rows, estimate
    own, theirs = ~view.control[rows], rows[view.control[rows]]
    choice = Choice(view.given.draft[theirs], view.given.length[theirs])
    return Given.of(view, theirs, choice, estimate.hazard[~own]), rows[own], Estimate(estimate.hazard[own], estimate.spread[own])
