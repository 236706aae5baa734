"""BanditSpec: the arm of the highest bound."""

import numpy as np
import pytest

from bench.baselines.bandit import BanditDrafts, BanditLengths, confidence_radius
from bench.baselines.per_request import PerRequest
from policy import LatencyModel
from tests.fakes import policies as fakes
from tests.fakes.policies import RNG

DRAFTS = ("a", "b", "c")
TIMES = LatencyModel.unit(3)
NONE = np.zeros(0, np.int64)


def view(requests, ceiling=8):
    return fakes.view(len(requests), DRAFTS, k=ceiling, request=np.array(requests, np.int64))


def run(policy, seen, steps, accepted, state=None):
    """Return the plans of steps in which ``accepted(plan)`` tokens are accepted, and the state."""
    state, plans = state or policy.start(), []
    for _ in range(steps):
        plan, state = policy.plan(seen, state, 0.0, RNG)
        plans.append(plan)
        state = policy.observe(fakes.outcome(seen, plan, accepted(plan)), state, 0.0)
    return plans, state


def good(draft, many=4, few=0):
    return lambda plan: np.where(plan.draft == draft, many, few)


def test_a_request_tries_every_draft_once_in_order():
    plans, _ = run(BanditDrafts(DRAFTS, TIMES, 8, length=4), view([5, 6]), 3, good(1))
    assert [plan.draft.tolist() for plan in plans] == [[0, 0], [1, 1], [2, 2]]
    assert {k for plan in plans for k in plan.length.tolist()} == {4}


@pytest.mark.parametrize("best", [0, 1, 2])
def test_a_request_learns_to_use_its_best_draft_most(best):
    plans, _ = run(BanditDrafts(DRAFTS, TIMES, 8, length=4), view([5]), 300, good(best))
    chosen = np.array([plan.draft[0] for plan in plans])
    assert (chosen[200:] == best).mean() > 0.8
    assert (chosen[3:] != best).sum() > 6  # once was not enough to rule the others out


def test_requests_learn_each_for_itself_and_a_newcomer_from_nothing():
    policy = BanditDrafts(DRAFTS, TIMES, 8, length=4)
    accepted = lambda plan: np.where(plan.draft == np.array([0, 2]), 4, 0)  # noqa: E731
    _, state = run(policy, view([5, 6]), 200, accepted)
    plan, _ = policy.plan(view([6, 9, 5]), state, 0.0, RNG)
    assert plan.draft.tolist() == [2, 0, 0]
    newcomer = view([9])
    plan, _ = policy.plan(newcomer, state, 0.0, RNG)
    state = policy.observe(fakes.outcome(newcomer, plan, 4), state, 0.0)
    assert policy.plan(newcomer, state, 0.0, RNG)[0].draft.tolist() == [1]


def test_the_reward_is_the_tokens_of_a_step_with_the_bonus():
    policy = BanditDrafts(DRAFTS, TIMES, 8, length=4)
    _, state = run(policy, view([5]), 2, good(1, many=3))
    assert state.of(np.array([5])).tolist() == [[[1, 1, 0], [1, 4, 0]]]


def test_a_finished_request_is_forgotten_and_a_step_without_a_draft_teaches_nothing():
    policy, seen = BanditDrafts(DRAFTS, TIMES, 8, length=4), view([5, 6])
    plans, state = run(policy, seen, 2, good(1))
    after = policy.observe(fakes.outcome(seen, plans[-1], 0, finished=np.array([5])), state, 0.0)
    assert after.request.tolist() == [6]
    idle = view([6], ceiling=0)
    plan, _ = policy.plan(idle, after, 0.0, RNG)
    assert plan.draft.tolist() == [-1]
    assert np.array_equal(
        policy.observe(fakes.outcome(idle, plan, 0), after, 0.0).figures, after.figures
    )


def test_a_draft_that_can_propose_nothing_is_passed_over():
    seen = view([5], ceiling=np.array([[0, 8, 8]]))
    plans, _ = run(BanditDrafts(DRAFTS, TIMES, 8, length=4), seen, 40, good(1))
    assert {int(plan.draft[0]) for plan in plans} == {1, 2}


def test_the_radius_is_the_one_of_the_paper_and_shrinks_with_pulls():
    radius = confidence_radius(np.array([[1.0, 9.0]]), 4)
    expected = [
        2 * np.sqrt(2 / 1 * (1 + 2 * np.log(2 * 100 * np.sqrt(2)))),
        2 * np.sqrt(10 / 81 * (1 + 2 * np.log(2 * 100 * np.sqrt(10)))),
    ]
    assert radius.tolist() == [pytest.approx(expected)]


def lengths(policy, seconds, steps, accepted=8, rows=2):
    """Return the lengths of steps that take ``seconds[k]``."""
    seen, state, chosen = view(list(range(rows))), policy.start(), []
    for step in range(steps):
        plan, state = policy.plan(seen, state, 0.0, RNG)
        chosen.append(int(plan.length.max()))
        took = seconds(step)[chosen[-1]] if callable(seconds) else seconds[chosen[-1]]
        state = policy.observe(fakes.outcome(seen, plan, accepted, took), state, 0.0)
    return chosen


def test_two_rounds_over_the_lengths_and_then_the_one_of_most_tokens_a_second():
    assert (
        lengths(BanditLengths(DRAFTS, TIMES, 8, draft="b"), [1, 1, 1.2, 9, 9], 14)
        == [0, 1, 2, 3, 4] * 2 + [2] * 4
    )
    assert lengths(BanditLengths(DRAFTS, TIMES, 8, draft="b"), [1, 3, 4, 5, 6], 12, accepted=1)[
        -2:
    ] == [0, 0]


def test_the_mean_follows_what_the_length_in_use_brings():
    took = lambda step: [1, 1, 1.2, 9, 9] if step < 12 else [1, 1, 30, 9, 9]  # noqa: E731
    chosen = lengths(BanditLengths(DRAFTS, TIMES, 8, draft="b"), took, 60)
    assert (chosen[11], chosen[-1]) == (2, 1)


def test_ranges_of_batches_learn_apart():
    policy = BanditLengths(DRAFTS, TIMES, 8, draft="b")
    state = policy.start()
    for rows, seconds in ((1, [9, 9, 9, 9, 1]), (2, [1, 9, 9, 9, 9])):
        for _ in range(10):
            seen = view(list(range(rows)))
            plan, state = policy.plan(seen, state, 0.0, RNG)
            took = seconds[int(plan.length[0])]
            state = policy.observe(fakes.outcome(seen, plan, 0, took), state, 0.0)
    chosen = {rows: policy.plan(view(list(range(rows))), state, 0.0, RNG) for rows in (1, 2, 3, 4)}
    assert [int(plan.length[0]) for plan, _ in chosen.values()] == [4, 0, 0, 0]
    assert [after.batches for _, after in chosen.values()] == [0, 1, 2, 2]
    assert set(state.arms) == {0, 1}


def test_more_lengths_may_be_tried():
    assert lengths(BanditLengths(DRAFTS, TIMES, 8, draft="b", most=8), [1] * 9, 20)[:9] == [
        *range(9)
    ]
    assert lengths(BanditLengths(DRAFTS, TIMES, 8, draft="b", most=8), [1] * 9, 20)[-1] == 8


def test_a_step_without_rows_or_time_is_no_trial():
    policy = BanditLengths(DRAFTS, TIMES, 8, draft="b")
    empty = view([])
    plan, state = policy.plan(empty, policy.start(), 0.0, RNG)
    assert policy.observe(fakes.outcome(empty, plan, 0), state, 0.0) == state
    seen = view([1])
    plan, state = policy.plan(seen, policy.start(), 0.0, RNG)
    assert policy.observe(fakes.outcome(seen, plan, 0, 0.0), state, 0.0) == state


def test_figures_of_requests_are_kept_by_their_ids():
    kept = PerRequest.none(1).with_figures(np.array([7, 3]), np.array([[70.0], [30.0]]), NONE)
    assert kept.of(np.array([3, 5, 7])).tolist() == [[30.0], [0.0], [70.0]]
    after = kept.with_figures(np.array([9, 3]), np.array([[90.0], [31.0]]), np.array([7]))
    assert (after.request.tolist(), after.figures.tolist()) == ([3, 9], [[31.0], [90.0]])
    assert kept.of(np.array([3])).tolist() == [[30.0]]  # not changed in place
