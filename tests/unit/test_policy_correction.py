"""Corrections of the tables by measured steps: a factor by part, the target curve's shape."""

import math
from dataclasses import replace

import numpy as np
import pytest

from policy import LatencyCurve, LatencyModel
from policy.latency import Correction
from policy.loops.times import (
    MAX_SHAPE,
    OCTAVES,
    TimedStep,
    learn_step,
    learn_times,
    predict,
    verify_s,
)

CURVE = LatencyCurve(1.0 + 0.01 * np.arange(513), 0.01)
MODEL = LatencyModel(CURVE, ())


def learnt(correction, tokens, base_s, parts, measured_s, step_s=0.0):
    """The correction after a step of these parts."""

    def learn(factor, shape, seen, *others):
        step = tokens, base_s, parts.copy(), measured_s.copy(), step_s
        return learn_times(factor, shape, seen, others[-1], *step)

    return correction.learnt(learn)


def run(true, tokens, steps=400, noise=0.0, correction=None, seed=0):
    """The correction after steps of the given numbers of tokens in turn."""
    rng = np.random.default_rng(seed)
    correction = correction or Correction.start(0)
    for step in range(steps):
        t = tokens[step % len(tokens)]
        measured = true(t) * np.exp(noise * rng.standard_normal())
        parts = np.array([CURVE.at(t), 0.0])
        correction = learnt(correction, t, CURVE.at(t), parts, np.array([measured, 0.0]))
    return correction


def seconds(correction, tokens, model=MODEL):
    times = correction.times(model)
    return np.array([verify_s(times, t) for t in tokens])


def corrected(factor, predicted, measured_s, steps=1):
    """The factors after steps that tell of no shape."""
    correction = Correction(np.array(factor))
    for _ in range(steps):
        correction = learnt(correction, 0, 0.0, predicted, measured_s)
    return correction.factor


def test_the_factors_follow_a_slower_machine_slowly_and_forget_no_part():
    predicted, measured_s = np.array([0.01, 0.0, 0.002]), np.array([0.02, 0.5, 0.0])
    first = corrected(np.ones(3), predicted, measured_s)
    assert 1.0 < first[0] < 1.1
    assert first[1] == first[2] == 1.0  # nothing predicted, nothing measured
    assert corrected(np.ones(3), predicted, measured_s, 300)[0] == pytest.approx(2.0, rel=1e-3)


def test_one_stall_hardly_moves_a_factor_and_it_is_bounded():
    predicted, stalled = np.array([0.01, 0.0]), np.array([100.0, 0.0])
    assert corrected(np.ones(2), predicted, stalled)[0] < 1.1
    assert corrected(np.ones(2), predicted, stalled, 2000)[0] == 8.0


def test_a_step_timed_only_as_a_whole_corrects_all_its_parts_alike():
    predicted = np.array([0.01, 0.0, 0.002])
    correction = Correction.start(1)
    for _ in range(300):
        correction = learnt(correction, 4, 0.01, predicted, np.zeros(3), 0.024)
    assert correction.factor == pytest.approx([2.0, 1.0, 2.0], rel=1e-3)
    assert not correction.octave_steps.any()


def test_a_draft_that_was_slow_once_does_not_count_as_slow_for_good_while_it_is_idle():
    factor, used = [3.0, 3.0, 8.0, 0.2, 1.4], np.array([0.01, 0.0, 0.0, 0.0, 0.0])
    once = corrected(factor, used, 3 * used)
    assert 7.9 < once[2] < 8.0
    assert once[[0, 1, 3, 4]] == pytest.approx([3.0, 3.0, 0.2, 1.4])
    assert corrected(factor, used, 3 * used, 4000)[2] == 1.5


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_curve_that_is_wrong_in_shape_is_learnt_where_steps_are_taken(noise):
    def true(tokens):
        return CURVE.at(tokens) * {32: 0.8, 64: 1.0, 128: 1.2}[tokens]

    counts = (32, 64, 128)
    found = seconds(run(true, counts, 1200, noise), counts)
    assert found == pytest.approx([true(t) for t in counts], rel=0.01 + 0.4 * noise)
    rise = found[2] - found[0]
    assert rise == pytest.approx(true(128) - true(32), rel=0.02 + 1.5 * noise)
    assert abs(CURVE.at(128) - CURVE.at(32) - (true(128) - true(32))) > 0.3  # one factor could not


def test_what_all_octaves_have_in_common_is_the_factor_and_holds_for_unseen_ones():
    correction = run(lambda tokens: 2 * CURVE.at(tokens), (16, 32))
    assert correction.factor[0] == pytest.approx(2.0, rel=0.01)
    assert correction.log_factor == pytest.approx(np.zeros(OCTAVES), abs=0.01)
    assert seconds(correction, [1, 400]) == pytest.approx(
        2 * CURVE.base(np.array([1, 400])), rel=0.02
    )


def test_slow_prompts_say_little_about_passes_of_few_tokens():
    correction = run(lambda tokens: CURVE.at(tokens) * (1.5 if tokens == 256 else 1.0), (256,), 8)
    few, many = seconds(correction, [16, 256]) / CURVE.base(np.array([16, 256]))
    assert many > 1.3
    assert few < 1.2


def test_unseen_octaves_take_after_their_neighbours():
    correction = run(lambda tokens: CURVE.at(tokens) * (1.3 if tokens == 256 else 1.0), (4, 256))
    counts = np.array([2, 32, 256, 500])
    low, between, high, beyond = seconds(correction, counts.tolist()) / CURVE.base(counts)
    assert high == pytest.approx(1.3, rel=0.01)
    common = math.sqrt(1.3)  # of what was seen; others lie between that and their neighbour
    assert 1.0 < low < common < beyond < 1.3
    assert 1.1 < between < 1.2


def test_a_corrected_curve_never_falls_and_only_the_base_is_changed():
    log_factor = np.zeros(OCTAVES)
    log_factor[5:] = -MAX_SHAPE
    model = LatencyModel(LatencyCurve(CURVE.base_s, 0.01, 0.2, 0.3), ())
    times = Correction(np.ones(2), applied=log_factor).times(model)
    base_s = seconds(Correction(np.ones(2), applied=log_factor), range(513), model)
    assert (np.diff(base_s) >= 0).all()
    assert base_s[16] == CURVE.base_s[16]
    least = max(CURVE.base_s[16:513].min(), 0.5 * CURVE.base_s[512])
    assert base_s[512] == pytest.approx(least, rel=0.3)
    assert verify_s(times, 514) - verify_s(times, 513) == pytest.approx(0.005)
    assert (times.row_s, times.context_s) == (0.2, 0.3)


def test_a_stall_hardly_moves_a_shape_and_it_is_bounded():
    steady = run(CURVE.at, (32, 64))
    stalled = run(lambda tokens: 1000.0, (64,), 1, correction=steady)
    assert seconds(stalled, [32, 64]) == pytest.approx(seconds(steady, [32, 64]), rel=0.08)
    torn = run(lambda tokens: CURVE.at(tokens) * (50 if tokens == 64 else 0.02), (1, 64), 3000)
    assert abs(torn.log_factor).max() <= MAX_SHAPE
    assert abs(torn.applied).max() <= MAX_SHAPE


def test_a_step_without_a_pass_of_the_target_or_beyond_all_octaves_is_taken():
    correction = learnt(Correction.start(0), 0, 0.0, np.zeros(2), np.array([0.0, 0.1]))
    assert (correction.factor == 1).all()
    assert not correction.octave_steps.any()
    assert run(lambda tokens: 1.1 * CURVE.at(tokens), (1 << 20,), 20).octave_steps[-1] > 1


def test_seconds_of_several_drafts_are_those_of_each_inside_its_grid_and_beyond():
    """Two rows of each draft; they catch up with a number of tokens and propose one or two."""
    curves = (LatencyCurve(np.arange(1.0, 5.0), 0.5, 0.1), LatencyCurve(np.full(2, 0.3), 0.2))
    times = Correction(np.array([1.0, 1.0, 2.0, 3.0])).times(LatencyModel(CURVE, curves))
    catchup = np.array([[1, 0], [9, 0], [0, 2], [0, 40]])
    draft, length = np.array([0, 0, 1, 1]), np.array([1, 2, 2, 1])
    parts = np.empty(4)
    step = TimedStep(np.arange(4), draft, length, length, np.zeros(4, np.int64), catchup, *[0] * 5)
    predict(times, step, parts)
    first = 2.0 * (curves[0].at(10) + curves[0].at(1) + 3 * 0.1)
    second = 3.0 * (curves[1].at(42) + curves[1].at(1))
    assert parts[2:] == pytest.approx([first, second])
    assert parts[0] == pytest.approx(CURVE.at(10))


def step_of(length, **more):
    """A step of rows with these lengths, of one draft."""
    length = np.array(length)
    rows = np.arange(len(length))
    draft = np.where(length > 0, 0, -1)
    catchup = np.zeros((len(rows), 1), np.int64)
    return TimedStep(rows, draft, length, length, 0 * rows, catchup, *[0] * 5)._replace(**more)


def after_overheads(seconds, model, steps=200):
    """The correction after steps that took these seconds besides forwards, by their lengths."""
    correction = Correction.start(1)
    for _ in range(steps):
        for length, overhead_s in seconds.items():
            measured_s = np.array([1.0, overhead_s, 0.1 * max(length)])

            def learn(*columns, length=length, measured_s=measured_s):
                step = step_of(length)
                return learn_step(model.tables, step, measured_s, measured_s.sum(), *columns)

            correction = correction.learnt(learn)
    return correction


def test_the_overhead_is_learnt_with_speculation_and_without():
    model = LatencyModel(CURVE, (CURVE,), 0.3, 0.2)
    before = Correction.start(1).times(model)
    assert (before.overhead_s, before.speculation_s) == (0.3, 0.2)
    plain = after_overheads({(0, 0): 0.4}, model).times(model)
    assert (plain.overhead_s, plain.speculation_s) == pytest.approx((0.4, 0.2))
    both = after_overheads({(0, 0): 0.4, (2, 0): 0.7}, model).times(model)
    assert (both.overhead_s, both.speculation_s) == pytest.approx((0.4, 0.3))
    quicker = after_overheads({(0, 0): 0.4, (2, 0): 0.3}, model).times(model)
    assert (quicker.overhead_s, quicker.speculation_s) == pytest.approx((0.4, 0.0))


def test_a_pause_hardly_moves_the_overhead():
    model = LatencyModel(CURVE, (CURVE,))
    steady = after_overheads({(0, 0): 0.4}, model)
    paused = steady.learnt(
        lambda *columns: learn_step(
            model.tables, step_of((0, 0)), np.array([1.0, 100.0]), 101.0, *columns
        )
    )
    assert paused.overhead_s[0] < 1.2 * steady.overhead_s[0]


@pytest.mark.parametrize(("change_tokens", "learns"), [(0, True), (1, True), (4, False)])
def test_a_pass_whose_width_changed_teaches_nothing_unless_a_change_is_cheap(change_tokens, learns):
    """A change takes what two, or eight, more tokens do: 1 % of a pass each."""
    model = LatencyModel(LatencyCurve(1 + 0.01 * np.arange(400), 0.01), (CURVE,))
    widths = {"last_tokens": 9, "change_tokens": 2 * change_tokens}

    def learnt(pass_tokens):
        step = step_of((0,) * 3, **widths, pass_tokens=pass_tokens)
        measured_s = np.array([3.0, 0.1, 0.0])
        once = Correction.start(1)
        return once.learnt(
            lambda *columns: learn_step(model.tables, step, measured_s, 3.1, *columns)
        )

    assert (learnt(3).factor[0] > 1) == learns
    assert learnt(9).factor[0] > 1


def after_changes(probed_tokens, true_tokens, steps, noise=0.0, correction=None):
    """The correction after passes of 9 and 25 tokens in turn, every one of another width."""
    model, rng = LatencyModel(CURVE, (CURVE,)), np.random.default_rng(3)
    correction = correction or Correction.start(1)
    for step in range(steps):
        last, tokens = (9, 25) if step % 2 else (25, 9)
        widths = {"last_tokens": last, "change_tokens": probed_tokens, "pass_tokens": tokens}
        verify_s = CURVE.at(tokens + true_tokens) * np.exp(noise * rng.standard_normal())

        def learn(*columns, widths=widths, verify_s=verify_s):
            measured_s = np.array([verify_s, 0.1, 0.0])
            return learn_step(model.tables, step_of((0,), **widths), measured_s, 0.0, *columns)

        correction = correction.learnt(learn)
    return correction


@pytest.mark.parametrize("probed_tokens", [8, 24, 72])
def test_the_price_of_a_change_of_width_is_learnt_whatever_the_start_measured(probed_tokens):
    for noise in (0.0, 0.03):
        change_s, steps = after_changes(probed_tokens, 24, 40, noise).change
        assert change_s == pytest.approx(0.24, rel=0.05 + 5 * noise)
        assert steps == 40


def test_the_price_of_a_change_is_never_negative_and_a_stall_hardly_moves_it():
    free = after_changes(24, -8, 60)
    assert free.change[0] == 0.0
    assert free.times(LatencyModel(CURVE, (CURVE,))).change_s == 0.0
    steady = after_changes(24, 24, 60)
    stalled = after_changes(24, 5000, 1, correction=steady)
    assert steady.change[0] < stalled.change[0] < 1.15 * steady.change[0]
    assert after_changes(24, 24, 100, correction=stalled).change[0] == pytest.approx(0.24, rel=0.01)


def test_a_padded_pass_teaches_what_its_width_takes():
    model, step = LatencyModel(CURVE, (CURVE,)), step_of((0, 0), pass_tokens=9)
    parts = np.empty(3)
    tokens, base_s, decoding_s = predict(model.tables, step, parts)
    assert (tokens, base_s, decoding_s) == (9, pytest.approx(CURVE.at(9)), 0)


def after_passes(steps_of, factor, steps, noise=0.02, prefill_tokens=0):
    """The correction after steps of these lengths in turn; passes with proposals take ``factor``
    times what the table says, for their decoding tokens.
    """
    model, rng = LatencyModel(CURVE, (CURVE,)), np.random.default_rng(3)
    correction = Correction.start(1)
    for step in range(steps):
        length = steps_of[step % len(steps_of)]
        verify_s = true_s(length, factor, prefill_tokens) * np.exp(noise * rng.standard_normal())

        def learn(*columns, length=length, verify_s=verify_s):
            measured_s = np.array([verify_s, 0.1, 0.0])
            ran = step_of(length, prefill_tokens=prefill_tokens)
            return learn_step(model.tables, ran, measured_s, 0.0, *columns)

        correction = correction.learnt(learn)
    return correction


def true_s(length, factor, prefill_tokens=0):
    decoding = len(length) + sum(length)
    more = factor - 1 if sum(length) else 0.0
    return CURVE.at(decoding + prefill_tokens) + more * CURVE.at(decoding)


def predicted_s(correction, length, prefill_tokens=0):
    parts = np.empty(3)
    times = correction.times(LatencyModel(CURVE, (CURVE,)))
    predict(times, step_of(length, prefill_tokens=prefill_tokens), parts)
    return parts[0]


NONE, ONE, FOUR, EIGHT = (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2)


@pytest.mark.parametrize("factor", [1.0, 1.3, 1.8])
def test_what_verifying_takes_by_itself_is_separated_from_what_tokens_take(factor):
    correction = after_passes((NONE, ONE, NONE, FOUR, EIGHT), factor, 300)
    for length in (NONE, ONE, (1, 1, 0, 0), FOUR, EIGHT, (3, 3, 3, 3)):
        assert predicted_s(correction, length) == pytest.approx(true_s(length, factor), rel=0.08)
    for length in (NONE, FOUR):
        expected_s = true_s(length, factor, 100)
        assert predicted_s(correction, length, 100) == pytest.approx(expected_s, rel=0.15)


def test_where_no_pass_is_plain_verifying_and_tokens_share_the_surprise():
    correction = after_passes((EIGHT,), 1.5, 200)
    assert predicted_s(correction, EIGHT) == pytest.approx(true_s(EIGHT, 1.5), rel=0.03)
    assert CURVE.at(4) < predicted_s(correction, NONE) < 1.4 * CURVE.at(4)


@pytest.mark.parametrize("prefill_tokens", [0, 100])
@pytest.mark.parametrize("length", [NONE, ONE, EIGHT])
def test_a_pass_that_takes_what_was_expected_teaches_nothing(length, prefill_tokens):
    model = LatencyModel(replace(CURVE, row_s=0.02, context_s=0.001, node_context_s=0.0005), ())
    before = Correction.start(0)
    before.verifying[:] = math.log(1.4), 20.0
    step = step_of(length, prefill_tokens=prefill_tokens, context=np.array([10, 20, 300, 40]))
    step, measured_s = step._replace(draft=step.draft * 0 - 1), np.empty(2)
    predict(before.times(model), step, measured_s)
    after = before.learnt(
        lambda *columns: learn_step(model.tables, step, measured_s.copy(), 0.0, *columns)
    )
    assert after.verifying[0] == pytest.approx(math.log(1.4), abs=1e-9)
    assert after.factor == pytest.approx(1.0, abs=1e-9)
    assert after.log_factor == pytest.approx(0.0, abs=1e-9)


def test_passes_with_prompts_say_nothing_of_what_verifying_takes():
    assert not after_passes((NONE, EIGHT), 1.8, 40, prefill_tokens=100).verifying.any()
