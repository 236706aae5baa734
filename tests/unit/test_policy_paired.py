"""The sequential test over pairs: rarely wrong, soon right, and it forgets what no longer holds."""

import math

import numpy as np
import pytest

from policy.paired import CLEAR_SAMPLES, MOST, Comparison, from_data


def samples_until(mean, deviation, most, seed, before=(), odd_share=0.0):
    """Return after how many samples the first is known to be better; None: not within ``most``."""
    rng, comparison = np.random.default_rng(seed), Comparison()
    for sample in before:
        comparison = comparison.learnt(sample)
    for number in range(1, most + 1):
        odd = rng.choice([-1.5, 1.5]) if rng.random() < odd_share else 0.0
        comparison = comparison.learnt(mean + deviation * rng.standard_normal() + odd)
        if comparison.is_better:
            return number
    return None


@pytest.mark.parametrize(
    ("mean", "deviation", "within"), [(0.03, 0.05, 100), (0.15, 0.05, 12), (0.15, 0.15, 40)]
)
def test_what_is_better_is_found_soon(mean, deviation, within):
    found = [samples_until(mean, deviation, within, seed) for seed in range(40)]
    assert sum(number is not None for number in found) >= 38
    assert min(number for number in found if number) >= CLEAR_SAMPLES


@pytest.mark.parametrize(
    ("mean", "deviation", "odd_share"), [(-0.02, 0.05, 0.0), (-0.05, 0.05, 0.02), (-0.1, 0.3, 0.0)]
)
def test_what_is_worse_is_never_taken_for_better(mean, deviation, odd_share):
    for seed in range(20):
        assert samples_until(mean, deviation, 500, seed, odd_share=odd_share) is None


def test_between_equals_a_verdict_is_rare():
    found = [samples_until(0.0, 0.05, 500, seed) for seed in range(40)]
    assert sum(number is not None for number in found) <= 4


@pytest.mark.parametrize("worst", [-0.15, -MOST, -10.0])
def test_however_bad_it_was_it_is_found_when_it_is_better(worst):
    for seed in range(10):
        assert samples_until(0.15, 0.05, 60, seed, before=[worst] * 500) is not None


def test_both_sides_are_alike():
    one, other = Comparison(), Comparison()
    for sample in np.random.default_rng(1).normal(0.2, 0.1, 30).tolist():
        one, other = one.learnt(sample), other.learnt(-sample)
    assert one.is_better
    assert not other.is_better
    assert not one.is_clearly_worse
    assert one.reverse().mean == pytest.approx(other.mean)
    assert one.reverse().weight == one.weight / 2


def test_a_loss_beyond_doubt_is_known_after_few_samples():
    comparison = Comparison()
    for _ in range(3):
        assert not comparison.is_clearly_worse
        comparison = comparison.learnt(-0.4)
    assert comparison.is_clearly_worse
    assert not Comparison().learnt(-0.05).learnt(-0.04).learnt(-0.06).is_clearly_worse


def test_old_evidence_weighs_less_and_is_less_certain():
    comparison = Comparison()
    for sample in (0.2, 0.3, 0.1, 0.2, 0.25, 0.15, 0.2, 0.2):
        comparison = comparison.learnt(sample)
    faded = comparison.fade(0.25)
    assert faded.mean == comparison.mean
    assert faded.error > 1.5 * comparison.error
    assert comparison.is_better
    assert not faded.is_better


def test_a_comparison_is_restored_from_its_numbers():
    comparison = Comparison().learnt(0.3).learnt(0.2)
    assert from_data(list(comparison)) == comparison


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v[:-1],
        lambda v: "x",
        lambda v: [*v[:-1], "x"],
        lambda v: [*v[:-1], math.nan],
        lambda v: [*v[:-1], True],
        lambda v: [0.0, *v[1:]],
        lambda v: [1e9, *v[1:]],
        lambda v: [v[0], -1.0, *v[2:]],
        lambda v: [*v[:2], 9.0, v[3]],
        lambda v: [*v[:-1], -1.0],
    ],
)
def test_other_numbers_are_refused_by_value(change):
    values = change(list(Comparison().learnt(0.3).learnt(0.2)))
    with pytest.raises(ValueError, match="got"):
        from_data(values)
