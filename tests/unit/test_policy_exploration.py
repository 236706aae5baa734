"""Trials: what is worth trying, what it costs, and that nothing stays out for good."""

from typing import NamedTuple

import numpy as np
import pytest

from bench.micro.choices import best_choice, step_problem
from policy import AcceptanceConfig
from policy.acceptance import AcceptanceModel
from policy.latency import Correction
from policy.loops.acceptance import Chains, set_hazards
from policy.loops.trials import find_trial
from policy.problem import Choice, Score, score
from tests.fakes.policies import RNG, latency, outcome, planner, view

NOTHING = np.zeros(0, np.int64)
PRICE = 1.0


def judged(rows=4, rates=(0.7, None)):
    """An estimator and its state.

    By draft the rate at which 400 chains of each row were accepted, None: nothing is known.
    """
    model, rng = AcceptanceModel(2, 8, AcceptanceConfig()), np.random.default_rng(0)
    state = model.admit(model.start(), np.arange(rows))
    for draft, rate in enumerate(rates):
        for request in range(rows) if rate is not None else ():
            accepted = np.cumprod(rng.random((400, 4)) < rate, axis=1).sum(1)
            free = Chains(
                np.full(400, request),
                np.full(400, draft),
                accepted,
                np.full(400, 4),
                np.zeros(400, int),
            )
            state, _ = model.observe(state, Chains(*[NOTHING] * 5), NOTHING, free)
    return model, state


class Found(NamedTuple):
    """A trial: the choice, its score, how many rows try, and what it costs."""

    choice: Choice
    result: Score
    rows: int
    cost_s: float


def look(credit_s, rows=4, catchup=1, rates=(0.7, None), price=PRICE):
    """The step's problem, the best choice at mean estimates, and the trial that is afforded."""
    model, state = judged(rows, rates)
    seen = view(rows, catchup=np.full((rows, 2), catchup))
    slot, hazard = np.arange(rows), np.empty((8, 2, rows))
    evidence = np.zeros((rows, 2), np.int64)
    set_hazards(state.estimates, slot, evidence, hazard)
    times = Correction.start(2).times(latency((0.1, 0.1)))
    problem = step_problem(times, seen, hazard, 8, 16.0)
    choice, result = best_choice(problem, price)
    tried = Choice(choice.draft.copy(), choice.length.copy())
    unread = np.zeros((2, rows), np.int64)
    count, cost_s, value, step_s, _ = find_trial(
        *(problem, state.estimates, model.constants, slot, evidence, hazard, unread, 1.5, price),
        *(float(credit_s), result.value, result.step_s, *tried),
    )
    found = Found(tried, Score(value, score(problem, tried).charged_s, step_s), count, cost_s)
    return problem, choice, found


def test_what_is_not_known_is_tried_and_what_is_known_to_be_worse_is_not():
    _, choice, found = look(1e6)
    assert set(choice.draft.tolist()) == {0}
    changed = found.choice.draft != choice.draft
    assert np.count_nonzero(changed) == found.rows > 0
    assert set(found.choice.draft[changed].tolist()) == {1}
    assert (found.choice.length[changed] > 0).all()
    assert look(1e6, rates=(0.7, 0.1))[2].rows == 0


def test_a_trial_is_paid_from_what_was_saved_or_does_not_happen():
    problem, choice, none = look(0.0, catchup=200)
    assert none.rows == 0
    assert none.choice.draft.tolist() == choice.draft.tolist()
    _, _, paid = look(1e6, catchup=200)
    assert paid.rows == problem.rows
    assert paid.cost_s > 0
    assert paid.result == score(problem, paid.choice)
    _, _, least = look(0.5 * paid.cost_s, catchup=200)
    assert least.rows < paid.rows
    assert least.rows == 0 or least.cost_s <= 0.5 * paid.cost_s


@pytest.mark.parametrize("rows", [1, 6])
def test_exploring_loses_no_more_than_its_share_of_time_and_one_step_saved(rows):
    """No draft is ever any good: what trying them costs at mean estimates is what is bought."""
    share, made = 0.02, planner(latency((0.05, 0.3)), explore_share=0.02)
    state, spent, seconds, rng = made.start(), 0.0, 0.0, np.random.default_rng(3)
    for step in range(300):
        seen = view(rows, catchup=np.full((rows, 2), 30))
        before = state.trial_budget_s
        plan, state = made.plan(seen, state, float(step), rng)
        seconds += plan.predicted_s
        if plan.notes.get("trial"):
            spent += max(before + share * plan.predicted_s - state.trial_budget_s, 0.0)
        assert state.trial_budget_s >= -1e-9
        none = np.zeros(rows, np.int64)
        done = outcome(seen, plan, none, plan.predicted_s)
        state = made.observe(done, state, float(step))
    assert 0 < spent <= share * seconds * 1.5 + 1e-9


def test_unknown_drafts_are_tried_one_after_the_other():
    """Trials that pay follow one another; one that only hopes waits for its turn."""
    drafts = ("a", "b", "c", "d")
    made = planner(latency((0.05,) * 4), drafts)
    state, tried, rng = made.start(), [], np.random.default_rng(0)
    for step in range(16):
        seen = view(8, drafts)
        plan, state = made.plan(seen, state, float(step), rng)
        tried.append(plan.notes.get("trial", 0))
        state = made.observe(outcome(seen, plan, 0, plan.predicted_s), state, float(step))
    assert tried[:3] == [8, 8, 8]
    assert sum(tried[3:]) <= 1


def test_without_a_budget_nothing_is_tried():
    made = planner(latency((0.1, 0.1)), explore_share=0.0)
    state = made.start()
    for step in range(100):
        plan, state = made.plan(view(4), state, float(step), RNG)
        assert "trial" not in plan.notes
        done = outcome(view(4), plan, plan.length, plan.predicted_s)
        state = made.observe(done, state, float(step))


def test_the_better_draft_is_found_by_trying_it():
    """Draft 1 is always accepted, draft 0 half the time; only trials can tell."""
    made = planner(latency((0.1, 0.1)), explore_share=0.02)
    state, used, rng = made.start(), [], np.random.default_rng(4)
    for step in range(400):
        seen = view(4, catchup=np.full((4, 2), 20))
        plan, state = made.plan(seen, state, float(step), rng)
        used.append((plan.draft == 1).mean())
        half = np.minimum(plan.length, rng.geometric(0.5, 4) - 1)
        accepted = np.where(plan.draft == 1, plan.length, half)
        done = outcome(seen, plan, accepted, plan.predicted_s)
        state = made.observe(done, state, float(step))
    assert np.mean(used[-100:]) > 0.9
