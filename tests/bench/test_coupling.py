import itertools

import numpy as np
import pytest
import torch

from bench.micro.accepted import (
    MOST,
    chain,
    fixed,
    followed,
    grow,
    hindsight,
    race_chance,
    race_ranks,
    rejection_ranks,
)

VOCAB = 12


def laws_of_two(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.softmax(1.5 * torch.randn(VOCAB, generator=generator), 0) for _ in range(2))


def test_rejection_accepts_its_candidates_as_often_as_the_rule_does():
    p, q = laws_of_two()
    rows, every = p.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]
    found = rejection_ranks(rows, q.expand(VOCAB, -1), every)
    first = torch.minimum(p, q)
    assert torch.allclose((found[:, 0] * p).float(), first, atol=1e-6)
    rest = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    second = (1 - first.sum()) * torch.minimum(rest, q)
    assert torch.allclose((found[:, 1] * p).float(), second, atol=1e-6)


def test_noise_in_hindsight_makes_the_text_and_the_race_as_often_as_the_formula_says():
    p, q = laws_of_two(2)
    count = 20_000
    own = torch.multinomial(p, count, True, generator=torch.Generator().manual_seed(0))[:, None]
    noise = hindsight(p.expand(count, -1), own, torch.Generator().manual_seed(1))
    assert torch.equal((noise / p).argmin(-1, keepdim=True), own)
    assert noise.mean(0).tolist() == pytest.approx([1.0] * VOCAB, abs=0.05)
    ranks = race_ranks(q / noise, own)
    expected = race_chance(p.expand(count, -1), q.expand(count, -1), own)
    assert float(ranks[:, 0].mean()) == pytest.approx(float(expected.mean()), abs=0.01)
    first = torch.bincount((q / noise).argmax(-1), minlength=VOCAB) / count
    assert first.tolist() == pytest.approx(q.tolist(), abs=0.015)


def test_chains_and_fixed_trees_count_what_is_followed():
    spine = torch.full((MOST + 2,), 0.5, dtype=torch.float64)
    ranks = torch.zeros(MOST + 2, MOST, dtype=torch.float64)
    ranks[:, 0], ranks[:, 1] = 0.5, 0.25
    assert chain(spine, 2).tolist() == [0.75] * 3
    assert fixed(spine, ranks, (1, 1)).tolist() == [0.75] * 3
    assert fixed(spine, ranks, (2, 2)).tolist() == [0.75 + 0.5 * 0.75] * 3


def test_a_tree_holds_the_most_confident_paths_and_every_prefix_is_a_tree():
    law = torch.tensor([0.6, 0.3, 0.1, 0.0])
    tokens, parents = grow(law.repeat(3)[:9], lambda *_: law.repeat(3)[:9])
    assert len(tokens) == MOST
    assert all(parent < node for node, parent in enumerate(parents))
    assert followed([5, 6, 8], [-1, 0, -1], [5, 6, 7], 3) == 2
    assert followed([5, 6, 8], [-1, 0, -1], [5, 6, 7], 1) == 1
    assert followed([5, 6], [-1, -1], [7, 6], 2) == 0


def test_best_first_is_the_best_by_enumeration():
    law = torch.tensor([0.5, 0.3, 0.2, *[0.0] * 5])
    tokens, parents = grow(law, lambda *_: law)
    chances = []
    for node in range(MOST):
        chance, at = 1.0, node
        while at >= 0:
            chance, at = chance * float(law[tokens[at]]), parents[at]
        chances.append(chance)
    paths = [p for n in range(1, 5) for p in itertools.product(law[:3].tolist(), repeat=n)]
    best = sorted((float(np.prod(p)) for p in paths), reverse=True)[:MOST]
    assert chances == pytest.approx(best)
