"""Contexts of an engine that pads: cut where that is less work, and else not, with the reason."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import LatencyModel
from policy.decomposition import Decomposition
from policy.latency import Correction
from tests.unit.test_policy_pipelining import ONE, knowing, line, planned
from tests.unit.test_policy_planner import RNG, outcome, view


def work_by_hand(context, length, merge_tokens):
    return sum((length + merge_tokens) for n in context for _ in range(0, n, length))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(0, 20),
    st.sampled_from([1, 4, 16]),
)
def test_the_piece_is_the_best_there_is(context, merge_tokens, block):
    found = Decomposition(merge_tokens, block).best_piece(np.array(context))
    lengths = range(block, max(context), block)
    best = min((work_by_hand(context, n, merge_tokens) for n in lengths), default=np.inf)
    padded = len(context) * max(context)
    assert found.work_tokens == min(best, padded)
    assert (found.piece_tokens > 0) == (best < padded) == (not found.why_not)
    if found.piece_tokens:
        assert found.work_tokens == work_by_hand(context, found.piece_tokens, merge_tokens)
        assert found.piece_tokens % block == 0


def test_one_long_context_among_short_ones_is_cut():
    found = Decomposition(8, 16).best_piece(np.array([1024, 64, 64, 64]))
    assert found == (64, 19 * (64 + 8), "")


def test_of_equal_work_the_longest_piece_is_taken():
    assert Decomposition(0, 1).best_piece(np.array([4, 2])).piece_tokens == 2  # or six of 1


@pytest.mark.parametrize(
    ("context", "merge_tokens", "why"),
    [
        ([64, 64], 8, "does not pay: 0.80"),
        ([1024, 64], 1e6, "does not pay: 0.00"),
        ([9, 5], 8, "no context is longer than a block"),
        ([], 8, "no context is longer than a block"),
    ],
)
def test_a_batch_that_gains_nothing_by_it_is_not_cut_and_the_reason_says_why(
    context, merge_tokens, why
):
    found = Decomposition(merge_tokens, 16).best_piece(np.array(context, np.int64))
    assert (found.piece_tokens, found.why_not) == (0, why)


@pytest.mark.parametrize("setting", ["merge_tokens", "block_tokens"])
def test_a_value_out_of_range_is_an_error_that_names_it(setting):
    with pytest.raises(ValueError, match=f"{setting} must be >= [01], got -1"):
        Decomposition(**{"merge_tokens": 1, "block_tokens": 1, setting: -1})


def test_contexts_are_cut_and_the_padding_that_is_left_is_paid_for():
    model = LatencyModel(line(0.05, 0.0, 1e-4), (line(0.01, 0.0),))
    seen = view(4, ONE, context=np.array([1600, 64, 64, 64]))
    executions = (None, Decomposition(8.0, 16))
    ragged, cut = (planned(knowing(model, execution, 0.6), seen) for execution in executions)
    assert (ragged.piece_tokens, cut.piece_tokens) == (0, 64)
    assert "why_not" not in cut.notes
    work, read = 28 * (64 + 8), 1792
    assert np.array_equal(cut.length, ragged.length)
    assert cut.predicted_s - ragged.predicted_s == pytest.approx(1e-4 * (work - read))
    even = planned(knowing(model, Decomposition(8.0, 16), 0.6), view(4, ONE))
    assert even.piece_tokens == 0
    assert even.notes["why_not"]["decomposition"].startswith("does not pay: 0.")


def test_a_step_that_takes_as_long_as_planned_teaches_no_correction():
    drafts = ("small", "large")
    model = LatencyModel(line(0.5, 0.001, 1e-4), (line(0.01, 0.0), line(0.02, 0.0)))
    made = knowing(model, Decomposition(8.0, 16), 0.6, drafts)
    seen = view(16, drafts, context=np.array([900, *range(50, 65)]))
    plan, state = made.plan(seen, made.start(), 0.0, RNG)
    assert plan.piece_tokens
    done = outcome(seen, plan, np.zeros(16, np.int64), piece_tokens=plan.piece_tokens)
    predicted = made.predicted(Correction.start(2).times(model), done, seen).parts
    assert predicted.sum() == pytest.approx(plan.predicted_s)
    names = ("verify", "overhead", "draft:small", "draft:large")
    told = replace(done, parts_s=dict(zip(names, predicted.tolist(), strict=True)))
    assert np.allclose(made.observe(told, state, 0.0).correction.factor, 1.0)
