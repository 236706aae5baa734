"""Cohorts and request decomposition: chosen where they pay, refused with the figures where they do not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.cohorts import best_cohorts, pipelined_s
from policy.decomposition import best_piece
from policy.goodput import Choice
from policy.latency import LatencyCurve, LatencyModel
from policy.plan import View


def view(context, **changes):
    n = len(context)
    fields = {
        "drafts": ("d",),
        "request": np.arange(n),
        "context": np.array(context),
        "remaining": np.full(n, 50),
        "ceiling": np.full((n, 1), 8),
        "catchup": np.ones((n, 1), np.int64),
        "ready": np.ones(n, np.bool_),
    }
    return View(**{**fields, **changes})


def line(fixed_s, token_s):
    return LatencyCurve(np.array([fixed_s, fixed_s + token_s]), token_s)


def chains(rows, length):
    return Choice(np.zeros(rows, np.int64), np.full(rows, length))


WEIGHT_BOUND = LatencyModel(line(1.0, 0.0), (line(0.25, 0.0),))
ROW_BOUND = LatencyModel(line(0.0, 0.1), (line(0.0, 0.1),))


def decided(latency, rows, length, contention, most, **changes):
    return best_cohorts(latency, latency.start(), view([100] * rows, **changes), chains(rows, length), contention, most)


def test_cohorts_pay_where_both_phases_scale_with_the_rows():
    found = decided(ROW_BOUND, 8, 1, 1.0, 4)
    assert found.cohorts == 2
    assert found.step_s == pytest.approx(1.6)  # verifying alone: 16 tokens; one after the other 2.4
    assert found.cohort.tolist() == [0] * 4 + [1] * 4
    assert not found.why_not


def test_they_never_pay_where_both_phases_are_bound_by_weights():
    found = decided(WEIGHT_BOUND, 8, 4, 1.0, 4)
    assert found.cohorts == 1  # D = V: a tie, and ties go to one cohort
    assert found.step_s == pytest.approx(2.0)
    assert found.why_not == "does not pay: 1.00"


def test_they_do_not_pay_where_the_phases_slow_each_other_down_as_much_as_they_overlap():
    found = decided(ROW_BOUND, 8, 1, 1.5, 4)
    assert found.cohorts == 1
    assert found.why_not == "does not pay: 1.00"


@pytest.mark.parametrize(
    ("contention", "most", "rows", "why"),
    [
        (1.0, 1, 8, "engine runs no cohorts"),
        (None, 4, 8, "contention is not measured"),
        (1.0, 4, 1, "one row"),
        (1.0, 4, 0, "one row"),
    ],
)
def test_without_the_means_there_is_one_cohort_and_the_reason_says_why(contention, most, rows, why):
    found = decided(ROW_BOUND, rows, 1, contention, most)
    assert found.cohorts == 1
    assert found.why_not == why


def test_a_contention_below_one_is_an_error():
    with pytest.raises(ValueError, match=r"contention must be >= 1, got 0\.9"):
        decided(ROW_BOUND, 8, 1, 0.9, 4)


def test_rows_that_are_not_ready_are_in_no_cohort():
    found = decided(ROW_BOUND, 5, 1, 1.0, 2, ready=np.array([True, False, True, True, True]))
    assert found.cohort.tolist() == [0, -1, 0, 1, 1]


def test_prompt_tokens_are_verified_with_the_first_cohort():
    with_prompt = decided(ROW_BOUND, 8, 1, 1.0, 2, prefill_tokens=4)
    assert with_prompt.step_s == pytest.approx(2.0)


def simulated_s(draft_s, verify_s, rounds=400):
    """Two resources that serve the cohorts in turn; the mean time of a round after the start-up."""
    drafter = verifier = 0.0
    ready = [0.0] * len(draft_s)
    ends = []
    for _ in range(rounds):
        for c, (d, v) in enumerate(zip(draft_s, verify_s, strict=True)):
            drafter = max(drafter, ready[c]) + d
            verifier = max(verifier, drafter) + v
            ready[c] = verifier
        ends.append(verifier)
    return (ends[-1] - ends[rounds // 2 - 1]) / (rounds - rounds // 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_the_time_of_a_round_is_that_of_two_resources_serving_cohorts_in_turn(seed, cohorts):
    draft_s, verify_s = np.random.default_rng(seed).uniform(0.1, 2, (2, cohorts))
    assert pipelined_s(draft_s, verify_s) == pytest.approx(simulated_s(draft_s, verify_s), rel=0.02)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.floats(1.0, 2.0))
def test_there_are_two_cohorts_only_where_the_formula_says_so(seed, contention):
    """All rows alike: 2 max(D(B/2), V(B/2)) x contention against D + V."""
    rng = np.random.default_rng(seed)
    model = LatencyModel(line(*rng.uniform(0, 1, 2)), (line(*rng.uniform(0, 0.5, 2)),))
    found = decided(model, 8, 2, contention, 2)
    draft = {b: 2 * model.drafts[0].at(b) for b in (4, 8)}
    verify = {b: model.target.at(3 * b) for b in (4, 8)}
    paired, sequential = 2 * max(draft[4], verify[4]) * contention, draft[8] + verify[8]
    assert found.cohorts == (2 if paired < sequential else 1)
    assert found.step_s == pytest.approx(min(paired, sequential))


def work_by_hand(context, length, merge_tokens):
    return sum((length + merge_tokens) for n in context for _ in range(0, n, length))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 20), st.sampled_from([1, 4, 16]))
def test_the_piece_is_the_best_there_is(context, merge_tokens, block):
    found = best_piece(np.array(context), True, merge_tokens, block)
    best = min((work_by_hand(context, length, merge_tokens) for length in range(block, max(context), block)), default=np.inf)
    padded = len(context) * max(context)
    assert found.work_tokens == min(best, padded)
    assert (found.piece_tokens > 0) == (best < padded)
    assert sum(context) == found.ragged_tokens <= found.work_tokens <= found.padded_tokens == padded
    if found.piece_tokens:
        assert found.work_tokens == work_by_hand(context, found.piece_tokens, merge_tokens)
        assert found.piece_tokens % block == 0


def test_one_long_context_among_short_ones_is_cut():
    found = best_piece(np.array([1024, 64, 64, 64]), True, 8, 16)
    assert (found.piece_tokens, found.pieces) == (64, 19)
    assert (found.work_tokens, found.padded_tokens, found.ragged_tokens, found.why_not) == (1368, 4096, 1216, "")


def test_of_equal_work_the_longest_piece_is_taken():
    assert best_piece(np.array([4, 2]), True, 0).piece_tokens == 2  # three pieces of 2, or six of 1


@pytest.mark.parametrize(
    ("context", "pads", "merge_tokens", "why"),
    [
        ([1024, 64], False, 8, "engine does not pad"),
        ([64, 64], True, 8, "does not pay: 0.80"),
        ([1024, 64], True, 1e6, "does not pay: 0.00"),
        ([9, 5], True, 8, "no context is longer than a block"),
        ([], True, 8, "no context is longer than a block"),
    ],
)
def test_a_batch_that_gains_nothing_by_it_is_not_cut_and_the_reason_says_why(context, pads, merge_tokens, why):
    found = best_piece(np.array(context, np.int64), pads, merge_tokens, 16)
    assert found.piece_tokens == 0
    assert found.why_not == why


@pytest.mark.parametrize("setting", ["merge_tokens", "block_tokens"])
def test_a_value_out_of_range_is_an_error_that_names_it(setting):
    with pytest.raises(ValueError, match=f"{setting} must be >= [01], got -1"):
        best_piece(np.array([5]), True, **{"merge_tokens": 1, setting: -1})
