import numpy as np
import pytest

from backend.randomness import Purpose, draft_lane, uniforms


def test_the_same_key_gives_the_same_number_and_every_field_of_the_key_counts():
    base = uniforms(7, 100, Purpose.ACCEPT, 3)
    assert base == uniforms(7, 100, Purpose.ACCEPT, 3)
    others = [
        uniforms(8, 100, Purpose.ACCEPT, 3),
        uniforms(7, 101, Purpose.ACCEPT, 3),
        uniforms(7, 100, Purpose.EMIT, 3),
        uniforms(7, 100, Purpose.PROPOSE, 3),
        uniforms(7, 100, Purpose.ACCEPT, 4),
        uniforms(100, 7, Purpose.ACCEPT, 3),
        uniforms(7, 100, Purpose.ACCEPT, 3, lane=1),
        uniforms(7, 100, Purpose.ACCEPT, 3, lane=draft_lane("one")),
        uniforms(7, 100, Purpose.ACCEPT, 3, lane=draft_lane("other")),
    ]
    assert len({float(value) for value in [base, *others]}) == 10


def test_arrays_equal_their_elements_and_broadcast():
    grid = uniforms([[1], [2]], range(5), Purpose.EMIT, 0)
    assert grid.shape == (2, 5)
    assert grid[1, 3] == uniforms(2, 3, Purpose.EMIT, 0)
    assert uniforms([], [], Purpose.EMIT, []).shape == (0,)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, 2**80 + 5])
def test_any_integer_is_a_seed(seed):
    assert 0.0 <= uniforms(seed, 0, Purpose.EMIT, 0) < 1.0
    assert uniforms(seed, 0, Purpose.EMIT, 0) == uniforms(seed % 2**64, 0, Purpose.EMIT, 0)


def test_numbers_are_uniform_and_neighbouring_keys_are_independent():
    draws = uniforms(np.arange(200)[:, None], np.arange(200), Purpose.ACCEPT, 0)
    counts, _ = np.histogram(draws, bins=20, range=(0.0, 1.0))
    assert ((counts - 2000) ** 2 / 2000).sum() < 60  # chi-square, 19 degrees of freedom: 60 is passed once in 4e6
    for other in (uniforms(np.arange(200)[:, None], np.arange(200), Purpose.EMIT, 0), np.roll(draws, 1, 0), np.roll(draws, 1, 1)):
        assert abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.03
