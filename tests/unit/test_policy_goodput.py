import numpy as np
import pytest

from bench.micro.choices import best_choice
from policy.loops.problem import StepProblem
from policy.plan import NO_DRAFT
from policy.problem import Choice, score


def problem(survival, *, verify_s, forward_s=0.1, ceiling=None, **changes):
    """``survival[n][d][k]``; verification given by total length; every draft forward costs
    ``forward_s`` whatever its rows.
    """
    gain = np.array(survival, float).transpose(2, 1, 0)
    k_max, drafts, rows = gain.shape
    ceiling = np.full((drafts, rows), k_max) if ceiling is None else np.array(ceiling).T
    fields = {
        "gain": gain * (np.arange(k_max)[:, None, None] < ceiling),
        "ceiling": ceiling,
        "base_value": float(rows),
        "undrafted_s": np.array([verify_s(m) for m in range(rows * k_max + 1)], float),
        "speculation_s": 0.0,
        "forward_s": forward_s
        if np.ndim(forward_s)
        else np.c_[np.zeros(drafts), np.full((drafts, 2 * rows), forward_s)],
        "first_tokens": np.ones((drafts, rows), np.int64),
        "draft_row_s": np.zeros((k_max, drafts, rows)),
        "nodes": np.ones((k_max, drafts, rows)),
        "switch_s": np.zeros((drafts, rows)),
        "horizon": np.full(rows, 16.0),
        "occupied": np.zeros((drafts, k_max), np.int64),
        "cap_s": np.inf,
    }
    return StepProblem(**{**fields, **changes})


def chain(rate, k=4):
    return rate ** np.arange(1, k + 1)


def flat(_):
    return 1.0


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_tie_goes_to_less_speculation(rows):
    free = problem(np.zeros((rows, 2, 4)), verify_s=flat, forward_s=0.0)
    assert best_choice(free, 1.0)[0].length.sum() == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_no_choice_exceeds_a_ceiling(rows):
    ceiling = np.array([[3, 0], [0, 2], [0, 0], [1, 1]] * 2)[:rows]
    choice, _ = best_choice(
        problem(np.full((rows, 2, 4), 0.9), verify_s=flat, forward_s=0.0, ceiling=ceiling), 1.0
    )
    assert choice.length.tolist() == ceiling.max(1).tolist()
    assert (choice.draft[choice.length == 0] == NO_DRAFT).all()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_staircase_is_looked_at_beyond_a_drop(rows):
    """Goodput is 1.95, then 0.95 at the stair's edge, then 2.4 at its end: an early stop would stay
    at its foot.
    """
    stairs = problem(
        [[chain(0.95, 8)]] * rows, verify_s=lambda m: 1.0 + 2.0 * (m > rows), forward_s=0.0
    )
    goodput = {k: score(stairs, Choice(np.zeros(rows, int), np.full(rows, k))) for k in (1, 2, 8)}
    assert goodput[2].value / 3 < goodput[1].value < goodput[8].value / 3
    assert (best_choice(stairs, price=rows * 2.4)[0].length == 8).all()


def test_each_row_gets_the_draft_that_suits_it():
    survival = [
        [chain(0.9), chain(0.2)],
        [chain(0.2), chain(0.9)],
        [chain(0.9), chain(0.2)],
        [chain(0.2), chain(0.9)],
    ]
    choice, _ = best_choice(
        problem(survival, verify_s=lambda m: 1 + 0.01 * m, forward_s=0.05), price=4.0
    )
    assert choice.draft.tolist() == [0, 1, 0, 1]
    assert choice.length.min() >= 2


def test_rows_share_one_draft_when_running_two_costs_more_than_it_brings():
    survival = [[chain(0.9), chain(0.88)], [chain(0.88), chain(0.9)]] * 4
    choice, _ = best_choice(
        problem(survival, verify_s=lambda m: 1 + 0.01 * m, forward_s=0.1), price=8.0
    )
    assert len(set(choice.draft.tolist())) == 1


def test_of_equal_drafts_the_cheaper_runs_whatever_its_column():
    survival = [[chain(0.8), chain(0.8)]] * 5
    for cheap in (0, 1):
        forward_s = np.c_[np.zeros(2), np.full((2, 10), 0.3)]
        forward_s[cheap, 1:] = 0.02
        choice, _ = best_choice(problem(survival, verify_s=flat)._replace(forward_s=forward_s), 5.0)
        assert set(choice.draft.tolist()) == {cheap}


def test_a_catch_up_is_charged_over_the_steps_it_will_serve():
    survival = [[chain(0.8)]] * 3
    switch = {"switch_s": np.full((1, 3), 1.0)}
    soon_over = problem(survival, verify_s=flat, horizon=np.ones(3), **switch)
    long_to_go = problem(survival, verify_s=flat, horizon=np.full(3, 16.0), **switch)
    assert best_choice(soon_over, 3.0)[0].length.sum() == 0
    chosen, _ = best_choice(long_to_go, 3.0)
    assert chosen.length.min() > 0
    charged, whole = score(long_to_go, chosen)[1:]
    assert whole - charged == pytest.approx(3 * (1.0 - 1 / 16))


def test_the_score_counts_each_depth_s_rows():
    forward_s = np.array([[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
    p = problem(
        np.full((3, 1, 4), 0.5),
        verify_s=lambda m: 100.0 + m,
        first_tokens=np.array([[2, 1, 1]]),
        forward_s=forward_s,
    )
    result = score(p, Choice(np.array([0, 0, NO_DRAFT]), np.array([3, 1, 0])))
    # depth 1: 2 + 1 tokens, depths 2 and 3: one row; four tokens verified
    assert result.step_s == pytest.approx(104.0 + 4.0 + 1.0 + 1.0)
    assert result.value == pytest.approx(3 + 4 * 0.5)


def test_a_higher_price_of_time_never_proposes_more():
    survival = [[chain(rate), chain(rate - 0.1)] for rate in (0.9, 0.7, 0.5, 0.8, 0.6)]
    p = problem(survival, verify_s=lambda m: 1 + 0.02 * m, forward_s=0.05)
    totals = [
        int(best_choice(p, price)[0].length.sum()) for price in (0.1, 1.0, 5.0, 10.0, 30.0, 100.0)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 20
    assert totals[-1] == 0
