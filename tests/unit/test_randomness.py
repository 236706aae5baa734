import numpy as np
import pytest

from backend.sampling.randomness import TAIL, exponentials, word

COUNT = 40_000


def noise(seeds, positions):
    return np.array([word(s, p) for s, p in zip(seeds, positions, strict=True)], np.uint64)


def test_a_word_is_of_seed_and_position_and_the_two_do_not_stand_in_for_each_other():
    assert word(7, 100) == word(7, 100)
    places = [(seed, position) for seed in range(-40, 40) for position in range(80)]
    assert len({word(*place) for place in places}) == len(places)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, -(2**63), 2**80 + 5])
def test_any_integer_is_a_seed(seed):
    assert 0 <= word(seed, 5) < 2**64
    assert word(seed, 5) == word(seed % 2**64, 5)
    assert 0.0 <= exponentials(noise([seed], [5]))[0] < 40.0


def test_the_mix_is_splitmix64():
    """The generator with seed 0 gives these first; a word of seed 0 mixes the first with 0."""
    assert word(0, 0xE220A8397B1DCDAF) == 0xE220A8397B1DCDAF
    found = exponentials(np.array([0, 1], np.uint64))
    bits = np.array([0xE220A8397B1DCDAF, 0x910A2DEC89025CC1], np.uint64) >> np.uint64(11)
    assert found.tolist() == (-np.log((bits.astype(float) + 0.5) * 2.0**-53)).tolist()


NEIGHBOURS = {
    "tokens": lambda n: np.full(n, word(5, 9), np.uint64) ^ np.arange(n, dtype=np.uint64),
    "positions": lambda n: noise([5] * n, range(n)),
    "seeds": lambda n: noise(range(n), [5] * n),
    "great seeds": lambda n: noise(range(2**64 - n, 2**64), [5] * n),
    "tails": lambda n: noise([5] * n, range(n)) ^ TAIL,
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_is_exponential_and_that_of_neighbours_unrelated(name):
    values = np.exp(-exponentials(NEIGHBOURS[name](COUNT)))
    counts, _ = np.histogram(values, bins=64, range=(0, 1))
    each = COUNT / 64
    assert ((counts - each) ** 2 / each).sum() < 130  # 63 degrees of freedom: passed once in 1e6
    for lag in (1, 2, 3, 8):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / COUNT**0.5


def test_tokens_places_and_tail_do_not_share_noise():
    positions = noise([5] * COUNT, range(COUNT))
    token = np.exp(-exponentials(positions ^ np.uint64(1)))
    others = positions ^ TAIL, positions ^ np.uint64(2), noise([6] * COUNT, range(COUNT))
    for other in others:
        assert abs(np.corrcoef(token, np.exp(-exponentials(other)))[0, 1]) < 5 / COUNT**0.5
