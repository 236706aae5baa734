import numpy as np
import pytest

from policy import AcceptanceConfig, PlannerConfig
from policy.acceptance import AcceptanceModel
from policy.goodput import Choice, score
from policy.probing import affordable
from policy.problem import Bounds, Given, step_problem
from policy.search import best_choice
from policy.selection import SELECTIONS, Draws, Explorer, drawn
from tests.unit.test_policy_planner import RNG, latency, outcome, planner, view

NOTHING = np.zeros(0, np.int64)
PRICE = 1.0


def judged(rows=4, rates=(0.7, None)):
    """An estimator and its state: by draft the rate at which 400 chains of each row were accepted, None: nothing is known."""
    model, rng, full = AcceptanceModel(2, 8, AcceptanceConfig()), np.random.default_rng(0), lambda value: np.full(400, value)
    state = model.admit(model.start(), list(range(rows)))
    for draft, rate in enumerate(rates):
        for request in range(rows) if rate is not None else ():
            held = np.cumprod(rng.random((400, 4)) < rate, axis=1).sum(1)
            state = model.observe(state, full(request), full(draft), held, full(4), NOTHING)
    return model, state


def look(selection, rows=4, catchup=1, draws=None, rates=(0.7, None), price=PRICE):
    """The step's problem, the best choice at mean estimates, and what is worth trying instead."""
    (model, state), seen = judged(rows, rates), view(rows, catchup=np.full((rows, 2), catchup))
    everyone = np.arange(rows)
    expected = model.expected(state, everyone.tolist())
    given = Given(NOTHING, Choice(NOTHING, NOTHING))
    times = latency((0.1, 0.1))
    problem = step_problem(times, times.start(), seen, everyone, expected.hazard, given, Bounds(8, 16.0))
    choice, _ = best_choice(problem, price)
    explorer = Explorer(selection, 1.5, False)
    return problem, choice, explorer.trial(model, state, problem, seen, everyone, expected, choice, price, draws)


def test_an_unknown_selection_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"selection must be one of .*'ucb'.*got 'softmax'"):
        PlannerConfig(selection="softmax")


@pytest.mark.parametrize("selection", ["probing", "ucb"])
def test_what_is_not_known_is_tried_and_what_is_known_to_be_worse_is_not(selection):
    _, choice, trial = look(selection)
    assert set(choice.draft.tolist()) == {0}
    assert set(trial.draft[trial.order].tolist()) == {1}
    assert (trial.length[trial.order] > 0).all()
    assert look(selection, rates=(0.7, 0.1))[2] is None


def test_upper_confidence_leaves_the_draft_that_is_used_at_its_mean():
    """Nothing is known of it: if it were hoped of too, its chains would only get longer."""
    _, choice, trial = look("ucb", rates=(None, 0.1), price=5.0)
    assert set(choice.draft.tolist()) == {0}
    assert choice.length.max() < 8
    assert trial is None


def test_thompson_tries_what_was_drawn_and_nothing_else():
    high, low = ((0.0, 4.0), (0.0, -4.0))
    _, _, trial = look("thompson", draws=Draws(1, {0: high, 1: low, 2: high, 3: low}))
    assert sorted(trial.order.tolist()) == [0, 2]
    assert trial.draft[[0, 2]].tolist() == [1, 1]


def test_draws_hold_for_sixteen_steps_and_newcomers_get_theirs():
    draws, rng, seen = Draws(), np.random.default_rng(1), []
    for step in range(33):
        draws = draws.next_step([1, 2] if step < 5 else [1, 3], 2, rng)
        seen.append(draws.normal[1])
    assert [len(set(seen[a:b])) for a, b in ((0, 16), (16, 32), (15, 17), (31, 33))] == [1, 1, 2, 2]
    assert set(draws.normal) == {1, 3}


def test_drawn_hazards_have_the_spread_of_what_is_not_known():
    (model, state), rng = judged(1), np.random.default_rng(2)
    expected = model.expected(state, [0])
    hazard, variance = expected.hazard, model.doubt(state, expected)[1]
    normals = (rng.standard_normal((1, 2)) for _ in range(4000))
    samples = np.array([drawn(state, hazard, variance, one)[0, :, 0] for one in normals])
    logit = np.log(samples / (1 - samples)) - np.log(hazard[0, :, 0] / (1 - hazard[0, :, 0]))
    assert logit.mean(0) == pytest.approx([0.0, 0.0], abs=0.08)
    assert logit[:, 0].std() < 0.2
    assert logit[:, 1].std() > 0.7
    level = 1 / (0.24 * 5)  # of a draft never seen, prior hazard 0.6
    assert logit[:, 1].var() == pytest.approx(variance[0, 1] + level, rel=0.1)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_trial_is_paid_from_what_was_saved_or_does_not_happen(selection):
    problem, choice, trial = look(selection, catchup=200, draws=Draws(1, dict.fromkeys(range(4), (0.0, 4.0))))
    mean = score(problem, choice)
    assert affordable(problem, trial, choice, mean, PRICE, 0.0).rows == 0
    paid = affordable(problem, trial, choice, mean, PRICE, 1e6)
    assert paid.rows == len(trial.order)
    assert paid.cost_s > 0
    least = affordable(problem, trial, choice, mean, PRICE, 0.5 * paid.cost_s)
    assert least.rows < paid.rows
    assert least.rows == 0 or least.cost_s <= 0.5 * paid.cost_s


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rows", [1, 6])
def test_exploring_loses_no_more_than_its_share_of_time_and_one_step_saved(selection, rows):
    """No draft is ever any good: what trying them costs in expectation at mean estimates is what is bought."""
    share, made = 0.02, planner(latency((0.05, 0.3)), selection=selection, explore_share=0.02)
    idle = planner(latency((0.05, 0.3)), explore_share=0.0)
    state, spent, seconds, rng = made.start(), 0.0, 0.0, np.random.default_rng(3)
    for step in range(300):
        seen = view(rows, catchup=np.full((rows, 2), 30))
        before = state.credit_s
        plan, state = made.plan(seen, state, float(step), rng)
        seconds += plan.predicted_s
        spent += max(before + share * plan.predicted_s - state.credit_s, 0.0) if plan.notes.get("probe") else 0.0
        assert state.credit_s >= -1e-9
        state = made.observe(outcome(seen, plan, np.zeros(rows, np.int64), plan.predicted_s), state, float(step))
    assert 0 < spent <= share * seconds * 1.5 + 1e-9
    assert not idle.plan(view(rows), idle.start(), 0.0, RNG)[0].notes["probe"]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_plans_follow_from_view_state_and_generator(selection):
    def plans(seed):
        made, state, rng, found = planner(selection=selection, explore_share=0.05), None, np.random.default_rng(seed), []
        state = made.start()
        for step in range(60):
            seen = view(3, request=np.arange(3) + step // 15)
            plan, state = made.plan(seen, state, float(step), rng)
            found.append((plan.draft.tolist(), plan.length.tolist()))
            state = made.observe(outcome(seen, plan, np.full(3, step % 4), 1.2), state, float(step))
        return found

    assert plans(1) == plans(1)
    assert (plans(1) == plans(2)) == (selection != "thompson")


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_better_draft_is_found_by_trying_it(selection):
    """Draft 1 is accepted always, draft 0 half the time; only trials can tell, and what they tell stays."""
    made, rng = planner(latency((0.1, 0.1)), selection=selection, explore_share=0.02), np.random.default_rng(4)
    state, used = made.start(), []
    for step in range(400):
        seen = view(4, catchup=np.full((4, 2), 20))
        plan, state = made.plan(seen, state, float(step), rng)
        used.append((plan.draft == 1).mean())
        accepted = np.where(plan.draft == 1, plan.length, np.minimum(plan.length, rng.geometric(0.5, 4) - 1))
        state = made.observe(outcome(seen, plan, accepted, plan.predicted_s), state, float(step))
    assert np.mean(used[-100:]) > 0.9
