"""A draft for each request by hedging, from what every draft would have had accepted."""

import numpy as np
import pytest

from bench.baselines.hedge import HedgeSpec, normal_hedge
from policy import LatencyModel
from policy.plan import FreeChains
from tests.fakes import policies as fakes

DRAFTS = ("a", "b", "c")
TIMES = LatencyModel.unit(3)
K = 4
RUN, LOSS, SEEN, WEIGHT = 1, 2, 3, 4


def view(requests, ceiling=8):
    return fakes.view(len(requests), DRAFTS, k=ceiling, request=np.array(requests, np.int64))


def free(*chains):
    """Return chains of (request, draft, accepted, scored)."""
    return FreeChains(*np.array(chains, np.int64).reshape(-1, 4).T)


def run(accepts, requests=(5,), steps=40, seed=0, state=None, scored=True, ceiling=8):
    """Return the drafts of steps in which draft d of row i gets ``accepts[i][d]`` tokens accepted;
    ``scored``: the drafts that are not chosen are scored, too.
    """
    policy, rng = HedgeSpec(DRAFTS, TIMES, 8, length=K), np.random.default_rng(seed)
    state, chosen = state or policy.start(), []
    accepts = np.broadcast_to(accepts, (len(requests), 3))
    for _ in range(steps):
        seen = view(requests, ceiling)
        plan, state = policy.plan(seen, state, 0.0, rng)
        chosen.append(plan.draft.copy())
        rows = np.arange(len(requests))
        right = np.minimum(accepts[rows, plan.draft], plan.length)
        others = [
            (request, d, min(accepts[i, d], right[i] + 1), min(right[i] + 1, K))
            for i, request in enumerate(requests)
            for d in range(3)
            if d != plan.draft[i]
        ]
        chains = free(*others) if scored else free()
        state = policy.observe(fakes.outcome(seen, plan, right, free=chains), state, 0.0)
    return np.array(chosen), state


@pytest.mark.parametrize("best", [0, 1, 2])
def test_a_request_finds_its_best_draft_within_few_steps(best):
    accepts = np.ones(3, np.int64)
    accepts[best] = 4
    chosen, _ = run(accepts)
    assert (chosen[15:] == best).all()


def test_at_first_every_draft_is_drawn_alike():
    chosen, _ = run([2, 2, 2], requests=range(300), steps=1)
    assert np.bincount(chosen[0], minlength=3).min() > 70


def test_requests_are_judged_apart_and_a_newcomer_knows_nothing():
    chosen, state = run([[4, 0, 0], [0, 0, 4]], requests=(5, 6))
    assert (chosen[20:] == [0, 2]).all()
    fresh, _ = run([0, 0, 0], requests=range(100, 200), steps=1, state=state)
    assert np.bincount(fresh[0], minlength=3).min() > 15


def test_a_draft_that_gets_worse_is_left():
    _, state = run([4, 1, 1])
    chosen, _ = run([0, 4, 1], steps=80, state=state)
    assert (chosen[60:] == 1).all()


def test_a_proposal_that_was_right_so_far_goes_on_in_the_next_step_s():
    policy = HedgeSpec(DRAFTS, TIMES, 8, length=K)
    state, seen = policy.start(), view([5])

    def figures(accepted, scored):
        nonlocal state
        plan, _ = policy.plan(view([5], 0), state, 0.0, np.random.default_rng(0))
        chains = free((5, 1, accepted, scored))
        state = policy.observe(fakes.outcome(seen, plan, 0, free=chains), state, 0.0)
        return state.of(np.array([5]))[0, [RUN, LOSS, SEEN], 1].tolist()

    assert figures(1, 1) == [1, 0, 0]  # how far it would have come is not known yet
    assert figures(1, 2) == [0, pytest.approx(1 - 3 / 5), 1]  # two tokens
    assert figures(0, 1) == [0, pytest.approx(2 / 5 + 4 / 5), 2]
    assert figures(3, 3) == [3, pytest.approx(6 / 5), 2]
    assert figures(2, 2) == [1, pytest.approx(6 / 5), 3]  # as long as a proposal is: no loss


def test_several_chains_of_a_draft_in_a_step_count_each():
    policy, seen = HedgeSpec(DRAFTS, TIMES, 8, length=K), view([5])
    plan, state = policy.plan(view([5], 0), policy.start(), 0.0, np.random.default_rng(0))
    chains = free((5, 1, 1, 2), (5, 1, 3, 4), (5, 2, 4, 4))
    state = policy.observe(fakes.outcome(seen, plan, 0, free=chains), state, 0.0)
    assert state.of(np.array([5]))[0, [RUN, LOSS, SEEN], 1].tolist() == [0, pytest.approx(4 / 5), 2]


def test_the_chosen_draft_s_own_proposal_counts():
    policy, seen = HedgeSpec(DRAFTS, TIMES, 8, length=K), view([5])
    plan, state = policy.plan(seen, policy.start(), 0.0, np.random.default_rng(0))
    state = policy.observe(fakes.outcome(seen, plan, 3), state, 0.0)
    own = state.of(np.array([5]))[0, :, plan.draft[0]]
    assert own[[LOSS, SEEN]].tolist() == [pytest.approx(1 / 5), 1]


def test_what_is_reported_of_one_draft_alone_moves_no_weight():
    _, state = run([4, 0, 0], steps=1, scored=False)
    assert not state.of(np.array([5]))[0, WEIGHT].any()


def test_without_reports_of_the_others_their_mean_stands_for_them():
    chosen, _ = run([2, 0, 0], steps=60, scored=False)
    assert (chosen[40:] == 0).all()
    assert sorted(chosen[:3, 0].tolist()) == [0, 1, 2]  # each is judged once


def test_a_draft_that_can_propose_nothing_is_not_drawn():
    _, state = run([4, 1, 1])
    able = np.array([[0, 8, 8]])
    drawn, _ = run([4, 1, 1], state=state, steps=30, ceiling=able)
    assert set(drawn[:, 0].tolist()) == {1, 2}
    plan, _ = HedgeSpec(DRAFTS, TIMES, 8, length=K).plan(
        view([5], 0), state, 0.0, np.random.default_rng(0)
    )
    assert plan.draft.tolist() == [-1]


def test_a_step_that_tells_nothing_changes_nothing():
    _, state = run([4, 1, 1])
    idle = view([5], 0)
    plan, _ = HedgeSpec(DRAFTS, TIMES, 8, length=K).plan(idle, state, 0.0, np.random.default_rng(0))
    after = HedgeSpec(DRAFTS, TIMES, 8, length=K).observe(fakes.outcome(idle, plan, 0), state, 0.0)
    assert np.array_equal(after.figures, state.figures)


def test_a_finished_request_is_forgotten():
    policy, seen = HedgeSpec(DRAFTS, TIMES, 8, length=K), view([5, 6])
    plan, state = policy.plan(seen, policy.start(), 0.0, np.random.default_rng(0))
    done = fakes.outcome(seen, plan, 2, finished=np.array([5]))
    assert policy.observe(done, state, 0.0).request.tolist() == [6]


@pytest.mark.parametrize(
    "regret", [[3.0, 1.0, -2.0], [0.1, 0.1, 0.1], [5.0, -1.0, 0.0], [9.0, 8.9, 0]]
)
def test_the_weights_are_those_of_normal_hedge(regret):
    x = np.maximum(regret, 0)
    # c by trying: the mean of exp(x^2 / 2c) is e
    c = np.geomspace(1e-4, 1e3, 400_001)
    potential = np.exp(np.minimum(x[:, None] ** 2 / (2 * c), 50)).mean(0)
    c = c[np.argmin(np.abs(potential - np.e))]
    weights, expected = normal_hedge(np.array([regret]))[0], x * np.exp(x**2 / (2 * c))
    assert weights / weights.sum() == pytest.approx(expected / expected.sum(), abs=2e-3)


def test_without_a_positive_regret_there_are_no_weights():
    assert normal_hedge(np.array([[0.0, -1.0]])).tolist() == [[0.0, 0.0]]
    assert normal_hedge(np.zeros((0, 2))).shape == (0, 2)
