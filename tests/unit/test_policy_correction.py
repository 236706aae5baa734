import numpy as np
import pytest

from policy import LatencyCurve
from policy.correction import MAX_SHAPE, OCTAVES, Shape, Target, corrected, correction_by_part, learnt, shaped

CURVE = LatencyCurve(1.0 + 0.01 * np.arange(513), 0.01)


def run(true, tokens, steps=400, noise=0.0, state=None, seed=0):
    """The correction and shape after steps of the given numbers of tokens in turn, of which the first is the target's factor."""
    rng = np.random.default_rng(seed)
    correction, shape = state or (np.ones(2), Shape.flat())
    for step in range(steps):
        t = tokens[step % len(tokens)]
        measured = true(t) * np.exp(noise * rng.standard_normal())
        base_s = CURVE.at(t)
        correction, shape = learnt(correction, shape, np.array([base_s, 0.0]), np.array([measured, 0.0]), Target(t, base_s, 0.0))
    return correction, shape


def seconds(state, tokens):
    correction, shape = state
    return correction[0] * shaped(CURVE, shape.applied).base(np.array(tokens))


def test_the_correction_follows_a_slower_machine_slowly_and_forgets_no_part():
    correction = np.ones(3)
    predicted, measured_s = np.array([0.01, 0.0, 0.002]), np.array([0.02, 0.5, 0.0])
    first = corrected(correction, predicted, measured_s)
    assert 1.0 < first[0] < 1.1
    assert first[1] == first[2] == 1.0  # nothing predicted, nothing measured
    for _ in range(300):
        correction = corrected(correction, predicted, measured_s)
    assert correction[0] == pytest.approx(2.0, rel=1e-3)
    assert correction_by_part(correction, ["small"]) == {"verify": correction[0], "overhead": 1.0, "draft:small": 1.0}


def test_one_stall_hardly_moves_the_correction_and_it_is_bounded():
    predicted = np.array([0.01])
    assert corrected(np.ones(1), predicted, np.array([100.0]))[0] < 1.1
    correction = np.ones(1)
    for _ in range(2000):
        correction = corrected(correction, predicted, np.array([100.0]))
    assert correction[0] == 8.0


def test_a_draft_that_was_slow_once_is_not_held_to_be_so_for_good_while_it_is_idle():
    correction, used = np.array([3.0, 3.0, 8.0, 0.2, 1.4]), np.array([0.01, 0.0, 0.0, 0.0, 0.0])
    once = corrected(correction, used, 3 * used)
    assert 7.9 < once[2] < 8.0
    assert once[[0, 1, 3, 4]] == pytest.approx(correction[[0, 1, 3, 4]])  # the target runs, what is quick comes back by itself
    for _ in range(4000):
        correction = corrected(correction, used, 3 * used)
    assert correction[2] == 1.5


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_curve_that_is_wrong_in_shape_is_learnt_where_steps_are_taken(noise):
    def true(tokens):
        return CURVE.at(tokens) * {32: 0.8, 64: 1.0, 128: 1.2}[tokens]

    found = seconds(run(true, (32, 64, 128), 1200, noise), [32, 64, 128])
    assert found == pytest.approx([true(t) for t in (32, 64, 128)], rel=0.01 + 0.4 * noise)
    slope = np.diff(seconds(run(true, (32, 64, 128), 1200, noise), [32, 128]))
    assert slope == pytest.approx(true(128) - true(32), rel=0.02 + 1.5 * noise)
    assert abs(CURVE.at(128) - CURVE.at(32) - (true(128) - true(32))) > 0.3  # one factor for all could not


def test_what_all_octaves_have_in_common_is_the_drift_and_holds_for_unseen_ones():
    correction, shape = state = run(lambda tokens: 2 * CURVE.at(tokens), (16, 32))
    assert correction[0] == pytest.approx(2.0, rel=0.01)
    assert shape.log_factor == pytest.approx(np.zeros(OCTAVES), abs=0.01)
    assert seconds(state, [1, 400]) == pytest.approx(2 * CURVE.base(np.array([1, 400])), rel=0.02)


def test_unseen_octaves_take_after_their_neighbours():
    state = run(lambda tokens: CURVE.at(tokens) * (1.3 if tokens == 256 else 1.0), (4, 256))
    low, between, high, beyond = seconds(state, [2, 32, 256, 500]) / CURVE.base(np.array([2, 32, 256, 500]))
    assert (low, high, beyond) == pytest.approx((1.0, 1.3, 1.3), rel=0.01)
    assert 1.1 < between < 1.2


def test_a_corrected_curve_never_falls_and_only_the_base_is_changed():
    log_factor = np.zeros(OCTAVES)
    log_factor[5:] = -MAX_SHAPE
    curve = shaped(LatencyCurve(CURVE.base_s, 0.01, 0.2, 0.3), log_factor)
    assert (np.diff(curve.base_s) >= 0).all()
    assert curve.base_s[16] == CURVE.base_s[16]
    assert curve.base_s[512] == pytest.approx(max(CURVE.base_s[16:513].min(), 0.5 * CURVE.base_s[512]), rel=0.3)
    assert (curve.slope_s, curve.row_s, curve.context_s) == (0.005, 0.2, 0.3)
    assert shaped(CURVE, np.zeros(OCTAVES)) is CURVE


def test_a_stall_hardly_moves_a_shape_and_it_is_bounded():
    state = run(CURVE.at, (32, 64))
    before, after = (seconds(s, [32, 64]) for s in (state, run(lambda tokens: 1000.0, (64,), 1, state=state)))
    assert after == pytest.approx(before, rel=0.08)
    _, shape = run(lambda tokens: CURVE.at(tokens) * (50 if tokens == 64 else 0.02), (1, 64), 3000)
    assert abs(shape.log_factor).max() <= MAX_SHAPE
    assert abs(shape.applied).max() <= MAX_SHAPE


def test_a_step_without_a_pass_of_the_target_or_beyond_all_octaves_is_taken():
    correction, shape = learnt(np.ones(2), Shape.flat(), np.zeros(2), np.array([0.0, 0.1]), Target(0, 0.0, 0.0))
    assert (correction == 1).all()
    assert not shape.seen.any()
    _, shape = run(lambda tokens: 1.1 * CURVE.at(tokens), (1 << 20,), 20)
    assert shape.seen[-1] > 1
