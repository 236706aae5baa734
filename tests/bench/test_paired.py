import pytest

from bench.sweep.run import repeated_share
from policy.simulation.statistics import abba, median_interval


def test_the_arms_change_places_from_block_to_block():
    assert [abba(("a", "b"), block) for block in range(4)] == [
        ["a", "b"],
        ["b", "a"],
        ["a", "b"],
        ["b", "a"],
    ]


def test_the_interval_holds_the_median_and_narrows_with_more_blocks():
    few, many = [1.2, 1.5, 1.3, 1.8, 1.4], [1.2, 1.5, 1.3, 1.8, 1.4] * 20
    (low, high), (lower, higher) = median_interval(few, seed=1), median_interval(many, seed=1)
    assert low < 1.4 < high
    assert low <= lower <= 1.4 <= higher <= high
    assert higher - lower < high - low


def test_the_interval_is_that_of_its_seed_and_of_one_value_a_point():
    assert median_interval([1.0, 2.0, 3.0], seed=5) == median_interval([1.0, 2.0, 3.0], seed=5)
    assert median_interval([1.25], seed=0) == (1.25, 1.25)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("a b c", 0.0),
        ("one two three four five six", 0.0),
        ("a b c d a b c d a b c d", 5 / 9),
    ],
)
def test_repetition_is_the_share_of_4_grams_seen_before(text, share):
    assert repeated_share(text) == pytest.approx(share)
