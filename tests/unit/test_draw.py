"""The draw: it follows the distribution, and is a function of distribution, seed and position
alone.
"""

import numpy as np
import pytest

from backend.sampling import draw as races
from backend.sampling.draw import HEAD
from backend.sampling.randomness import word

COUNT = 8_000


def draw(probs, noise, token_ids=None):
    """The columns drawn of the rows of a matrix."""
    return races.draw(probs.__getitem__, noise, token_ids)


def finishers(probs, noise, most):
    return races.finishers(probs.__getitem__, noise, most)


def words(count, seed=3):
    return np.array([word(seed, position) for position in range(count)], np.uint64)


def shares(*parts):
    """A distribution of (how many tokens, their mass together)."""
    return np.concatenate([np.full(n, mass / n) for n, mass in parts])


FALLING = np.arange(1, 5_000) ** -1.1
DISTRIBUTIONS = {
    "one token": shares((1, 1.0)),
    "a head and nothing else": np.array([0.5, 0.0, 0.3, 0.15, 0.05, 0.0]),
    "a heavy tail": shares((3, 0.3), (4000, 0.4), (2, 0.3)),
    "several heads and tails": shares((1, 0.1), (300, 0.2), (1, 0.4), (700, 0.1), (4, 0.2)),
    "a head that is hardly one": shares((1, HEAD), (5000, 1 - HEAD)),
    "a tail without a head": shares((5000, 1.0)),
    "a head without a tail": shares((500, 1.0)),
    "everything at the threshold": shares((1000, 1.0)),
    "a tail that falls": FALLING / FALLING.sum(),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tokens_follow_the_distribution_over_positions(name, dtype):
    assert follows(DISTRIBUTIONS[name], dtype, words(COUNT))


def test_tokens_follow_the_distribution_over_seeds():
    seeds = [*range(COUNT // 2), *range(2**64 - COUNT // 2, 2**64)]
    noise = np.array([word(seed, 7) for seed in seeds], np.uint64)
    assert follows(DISTRIBUTIONS["several heads and tails"], np.float32, noise)


def follows(probs, dtype, noise):
    """Whether the draws are what a distribution gives, by chi-square over cells of at least 20
    draws.
    """
    one = probs.astype(dtype)
    drawn = races.draw(lambda row: one, noise)
    counts = np.bincount(drawn, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    cells, mass = np.zeros(len(probs), int), 0.0
    for token in range(1, len(probs)):
        mass += probs[token - 1]
        cells[token] = cells[token - 1] + (mass * len(noise) >= 20)
        mass *= cells[token] == cells[token - 1]
    expected = len(noise) * np.bincount(cells, probs)
    found = np.bincount(cells, counts)
    kept = expected > 0
    freedom = kept.sum() - 1
    statistic = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    return statistic <= freedom + 5 * (2 * freedom) ** 0.5 + 15  # passed less than once in 1e6


def sharp(count, vocab, seed=0):
    return softmax(3.0 * np.random.default_rng(seed).standard_normal((count, vocab), np.float32))


def softmax(logits):
    masses = np.exp(logits)
    return masses / masses.sum(-1, keepdims=True)


def test_a_draw_is_the_same_alone_and_in_any_batch_and_order():
    probs, noise = sharp(64, 3000), words(64)
    whole = draw(probs, noise)
    assert len(set(whole)) > 30
    assert any(probs[row, token] < HEAD for row, token in enumerate(whole))
    assert [draw(probs[i : i + 1], noise[i : i + 1])[0] for i in range(64)] == whole
    order = np.random.default_rng(0).permutation(64)
    assert draw(probs[order], noise[order]) == [whole[i] for i in order]


def test_seed_and_position_decide():
    probs = np.broadcast_to(sharp(1, 3000), (200, 3000))
    assert draw(probs, words(200, 3)) == draw(probs, words(200, 3))
    agree = np.mean(np.array(draw(probs, words(200, 3))) == draw(probs, words(200, 4)))
    assert agree < 0.4


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_any_seed_draws(seed):
    probs = DISTRIBUTIONS["several heads and tails"][None]
    (token,) = draw(probs, np.array([word(seed, 2**20)], np.uint64))
    assert probs[0, token] > 0


def test_a_shortlist_with_the_distribution_draws_the_tokens_of_the_whole_vocabulary():
    listed = np.random.default_rng(1).permutation(5000)[:800]
    probs = np.zeros((300, 5000), np.float32)
    part = sharp(300, 800)
    probs[:, listed] = part
    drawn = [int(listed[column]) for column in draw(part, words(300), listed)]
    assert drawn == draw(probs, words(300))
    assert any(probs[row, token] < HEAD for row, token in enumerate(drawn))


def test_a_tail_that_is_only_rounding_leaves_it_to_the_head():
    probs = np.array([[0.6, 0.4]] * 2000, np.float32) * np.float32(1 + 1e-6)
    assert set(draw(probs, words(2000))) == {0, 1}


@pytest.mark.parametrize("most", [1, 4, 2000])
def test_finishers_are_in_the_order_of_the_race_and_the_first_is_drawn_where_the_head_wins(most):
    probs, noise = sharp(300, 3000), words(300)
    won = 0
    pairs = zip(finishers(probs, noise, most), draw(probs, noise), strict=True)
    for row, (found, token) in enumerate(pairs):
        columns, chances = zip(*found, strict=True)
        assert 0 < len(found) <= most
        assert all(probs[row, column] >= HEAD for column in columns)
        assert list(chances) == sorted(chances, reverse=True)
        assert chances[-1] > 0.0
        assert sum(chances) <= 1 + 1e-12
        if probs[row, token] >= HEAD:
            assert columns[0] == token
            won += 1
    assert 200 < won < 300


def test_without_a_head_no_token_is_likely_to_win():
    probs = DISTRIBUTIONS["a tail without a head"][None]
    assert finishers(probs, words(1), 4) == [[]]


def test_a_draft_with_nearly_the_distribution_mostly_draws_the_token_and_ranks_the_others():
    probs, noise = sharp(2000, 400), words(2000)
    error = np.random.default_rng(9).standard_normal(probs.shape, np.float32)
    drafts = softmax(np.log(probs) + error)
    hits = np.zeros(3)
    for found, token in zip(finishers(drafts, noise, 3), draw(probs, noise), strict=True):
        hits[: len(found)] += [column == token for column, _ in found]
    assert hits[0] > 2000 * 0.5
    assert hits[0] > 2 * hits[1] > 3 * hits[2]
