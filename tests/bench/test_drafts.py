import numpy as np
import pytest
import torch

from bench.drafts import (
    accepting,
    by_coins,
    by_lookup,
    interval,
    overlap,
    steps,
    tokens_per_step,
)


def test_a_greedy_step_is_a_run_of_hits_and_the_targets_token():
    run = by_coins(np.array([1.0, 1.0, 0.0, 0.0, 1.0]), np.full(5, 0.5))
    assert steps(run, 5, 2) == [2, 0, 1]
    assert steps(run, 5, 8) == [2, 0, 1]
    assert steps(run, 5, 1) == [1, 0, 0, 1]


@pytest.mark.parametrize("length", [1, 4])
def test_tokens_a_step_of_a_constant_acceptance_are_the_geometric_sum(length):
    rng = np.random.default_rng(0)
    tokens, share = 60_000, 0.6
    run = by_coins(np.full(tokens, share), rng.random(tokens))
    expected = (1 - share ** (length + 1)) / (1 - share)
    assert tokens_per_step([(tokens, steps(run, tokens, length))]) == pytest.approx(
        expected, rel=0.01
    )


def test_a_token_of_the_targets_law_is_accepted_as_often_as_a_sampled_proposal():
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(1, 12, generator=generator) for _ in range(2))
    draft[0, 3] = -torch.inf  # not in the draft's shortlist
    count = 40_000
    tokens = torch.multinomial(
        (target / 0.8).softmax(dim=1)[0], count, replacement=True, generator=generator
    ).tolist()
    accepted = accepting(draft.expand(count, -1), target.expand(count, -1), tokens, 0.8).mean()
    assert accepted == pytest.approx(float(overlap(draft, target, 0.8)), abs=0.01)
    assert 0.2 < accepted < 0.9


def test_at_temperature_zero_the_drafts_choice_must_be_the_token():
    draft = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    assert accepting(draft, draft, [1, 2], 0.0).tolist() == [1.0, 0.0]
    assert overlap(draft, draft.flip(1), 0.0).tolist() == [1.0, 0.0]


def test_lookup_proposes_what_followed_and_counts_what_the_text_repeats():
    run = by_lookup([1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 9, 9])
    assert run(0, 4) == 2
    assert run(0, 1) == 1
    assert run(3, 1) == 0


def test_the_interval_holds_the_mean():
    texts = [(10, [1] * (4 + number % 3)) for number in range(30)]
    low, high = interval(texts, np.random.default_rng(0))
    assert low < tokens_per_step(texts) < high
