"""A bandit over lengths by batch size, off included."""

import numpy as np
import pytest

from bench.baselines.nightjar import Nightjar, NightjarState, Trials
from policy import LatencyCurve, LatencyModel
from tests.fakes import policies as fakes

DRAFTS = ("a", "b")
TARGET = LatencyCurve(np.full(9, 1.0), 0.0)
DRAFT = LatencyCurve(np.linspace(0.0, 10.0, 101), 0.1)  # 0.1 s a token
LATENCY = LatencyModel(TARGET, (DRAFT, DRAFT))


class Drawn:
    """A generator that draws what it is given: whether a bin tries a length, and which."""

    def __init__(self, chance=0.0, length=0):
        self.chance, self.length = chance, length

    def random(self):
        return self.chance

    def integers(self, high):
        assert high == 5
        return self.length


def policy():
    return Nightjar(DRAFTS, LATENCY, 8, draft="b", length=4)


def view(rows, **changes):
    return fakes.view(rows, DRAFTS, **changes)


def run(seconds, rows, steps, seed=0, state=None):
    """Return the lengths of steps of as many tokens as proposed that take ``seconds[k]``."""
    p, rng, lengths = policy(), np.random.default_rng(seed), []
    state = state or p.start()
    for _ in range(steps):
        seen = view(rows)
        plan, state = p.plan(seen, state, 0.0, rng)
        lengths.append(int(plan.length.max()))
        state = p.observe(fakes.outcome(seen, plan, 8, seconds[lengths[-1]]), state, 0.0)
    return lengths, state


def test_blocks_double_and_their_bins_are_as_long_as_their_root():
    trials, bins = Trials(np.zeros(5), np.zeros(5)), []
    for _ in range(22):
        trials = trials.next_bin()
        bins.append((trials.block, trials.place, trials.steps_left))
    assert bins[:2] == [(1, 1, 1), (2, 1, 1)]
    assert [left for block, _, left in bins if block == 2] == [1, 1]
    assert [left for block, _, left in bins if block == 3] == [2, 2]
    assert [left for block, _, left in bins if block == 4] == [2] * 4
    assert [left for block, _, left in bins if block == 5] == [4] * 4
    assert [number for block, number, _ in bins if block == 5] == [1, 2, 3, 4]


def known(*token_s, place=1, block=5, last=3, left=0):
    """Return the state of a batch of two rows that knows these seconds a token; 0: not tried."""
    tokens = np.array([100.0 * (s > 0) for s in token_s])
    trials = Trials(tokens, np.array(token_s) * 100, block, place, left, length=1)
    return NightjarState({1: trials}, 1, last)


@pytest.mark.parametrize(
    ("chance", "place", "length"),
    [
        (0.49, 1, 4),  # the second bin: a trial by half
        (0.51, 1, 2),
        (0.32, 2, 4),
        (0.34, 2, 2),
        (0.99, 4, 4),  # the next block's first bin always tries
    ],
)
def test_the_bth_bin_tries_a_random_length_with_probability_1_over_b(chance, place, length):
    state = known(5, 4, 1, 3, 2, place=place)
    plan, after = policy().plan(view(2), state, 0.0, Drawn(chance, 4))
    assert plan.length.tolist() == [length] * 2
    assert after.trials[1].length == after.length == length


def test_a_bin_keeps_its_length():
    state = known(5, 4, 1, 3, 2, left=2)
    for left in (1, 0):
        plan, state = policy().plan(view(2), state, 0.0, Drawn(0.0, 4))
        assert (plan.length.tolist(), state.trials[1].steps_left) == ([1, 1], left)
    assert policy().plan(view(2), state, 0.0, Drawn(0.0, 4))[0].length.tolist() == [4, 4]


def test_a_length_that_was_not_tried_is_no_candidate_and_without_any_there_is_a_trial():
    plan, _ = policy().plan(view(2), known(5, 4, 0, 3, 0, place=2), 0.0, Drawn(0.9, 4))
    assert plan.length.tolist() == [3, 3]
    plan, _ = policy().plan(view(2), known(0, 0, 0, 0, 0, place=2), 0.0, Drawn(0.9, 4))
    assert plan.length.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("last", "catchup", "length"),
    [
        (3, 100, 2),
        (0, 1, 2),
        (0, 2, 2),  # 0.2 s over two tokens is less than what is gained
        (0, 7, 4),  # 1.2 s: 0.3 a token at 4, and 0.6 at 2
        (0, 100, 0),
    ],
)
def test_switching_on_counts_the_draft_s_catch_up_shared_by_the_length(last, catchup, length):
    state = known(2.0, 3.0, 1.0, 3.0, 1.2, place=2, last=last)
    seen = view(2, catchup=np.full((2, 2), catchup))
    assert policy().plan(seen, state, 0.0, Drawn(0.9))[0].length.tolist() == [length] * 2


def test_a_draft_that_lacks_nothing_is_switched_on_for_nothing():
    state = known(2.0, 3.0, 1.95, 3.0, 3.0, place=2, last=0)
    seen = view(2, catchup=np.ones((2, 2), np.int64))
    assert policy().plan(seen, state, 0.0, Drawn(0.9))[0].length.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("seconds", "best"), [([1, 1.2, 1.4, 1.6, 1.8], 4), ([1, 3, 5, 7, 9], 0), ([4, 4, 1, 8, 9], 2)]
)
def test_it_learns_to_use_the_length_of_the_least_seconds_a_token(seconds, best):
    lengths, _ = run(seconds, 3, 1500)
    assert np.mean(np.array(lengths[1000:]) == best) > 0.6
    assert len(set(lengths)) == 5


def test_ranges_of_batches_learn_apart():
    _, state = run([1, 1.2, 1.4, 1.6, 1.8], 3, 300)
    p = policy()
    for rows, batches in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (128, 7)):
        assert p.plan(view(rows), state, 0.0, Drawn())[1].batches == batches
    assert set(state.trials) == {2}
    _, state = run([1, 9, 9, 9, 9], 9, 300, state=state)
    lengths, _ = run([1, 1.2, 1.4, 1.6, 1.8], 3, 100, seed=1, state=state)
    assert np.mean(np.array(lengths) == 4) > 0.5


def test_the_step_s_tokens_and_seconds_count_for_the_length_that_was_planned():
    p, seen = policy(), view(2, k=0)  # nothing can be proposed
    plan, state = p.plan(seen, p.start(), 0.0, Drawn(0.0, 3))
    state = p.observe(fakes.outcome(seen, plan, 0, 1.5), state, 0.0)
    assert state.trials[1].tokens.tolist() == [0, 0, 0, 2, 0]
    assert state.trials[1].seconds.tolist() == [0, 0, 0, 1.5, 0]
    empty = view(0)
    plan, idle = p.plan(empty, state, 0.0, Drawn())
    assert p.observe(fakes.outcome(empty, plan, 0), idle, 0.0) == idle


def test_an_unknown_draft_is_named():
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'x'"):
        Nightjar(DRAFTS, LATENCY, 8, draft="x", length=4)
