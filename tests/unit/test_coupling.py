"""Plan-invariant sampling: the noise is its key's alone, the winner follows the law."""

import numpy as np
import pytest
import torch

from backend.engines import coupling
from backend.engines.coupling import exponentials, fastest, winner
from backend.engines.processing import WHOLE_VOCABULARY, Columns
from backend.randomness import Purpose, key, mix


def test_the_noise_is_splitmix64_of_key_and_token():
    tokens = torch.tensor([0, 1, 49_151, 128_000])
    word = key(123456789, 77, Purpose.RACE)
    bits = mix(tokens.numpy().astype(np.uint64) ^ word) >> np.uint64(11)
    expected = -np.log((bits.astype(np.float64) + 0.5) * 2.0**-53)
    found = exponentials(int(word.astype(np.int64)), tokens)
    assert torch.allclose(found, torch.from_numpy(expected), rtol=1e-15, atol=0)


def test_the_noise_is_exponential():
    values = exponentials(int(key(5, 9, Purpose.RACE).astype(np.int64)), torch.arange(200_000)).numpy()
    counts, _ = np.histogram(np.exp(-values), bins=64, range=(0, 1))
    assert ((counts - 200_000 / 64) ** 2 / (200_000 / 64)).sum() < 130  # 63 degrees of freedom: passed once in 1e6
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.012


def test_winners_follow_the_law_over_seeds_and_over_positions():
    law = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]) * 7  # any mass
    for keys in ([(seed, 3) for seed in range(8_000)], [(3, position) for position in range(8_000)]):
        counts = np.bincount([winner(law, *pair, WHOLE_VOCABULARY) for pair in keys], minlength=5)
        expected = (law / law.sum()).numpy() * len(keys)
        assert counts[1] == 0
        used = expected > 0
        assert ((counts - expected)[used] ** 2 / expected[used]).sum() < 31  # 3 degrees of freedom


def test_a_shortlisted_head_races_with_the_noise_of_its_tokens():
    whole = torch.zeros(50)
    ids = torch.tensor([31, 4, 17], dtype=torch.int32)
    part = torch.tensor([0.2, 0.5, 0.3])
    whole[ids.long()] = part
    for seed in range(50):
        assert winner(whole, seed, 8, WHOLE_VOCABULARY) == ids[winner(part, seed, 8, Columns(ids))]


@pytest.mark.parametrize("few", [0, 10**9], ids=["those that can be drawn are picked out", "all run"])
@pytest.mark.parametrize("kept", [3, 600])
def test_who_runs_makes_no_difference_and_what_cannot_be_drawn_never_comes_in(few, kept, monkeypatch):
    generator = torch.Generator().manual_seed(kept)
    law = torch.rand(1000, generator=generator)
    law[torch.randperm(1000, generator=generator)[kept:]] = 0.0
    times = exponentials(int(key(7, 11, Purpose.RACE).astype(np.int64)), torch.arange(1000)) / law
    expected = [column for column in times.argsort().tolist() if law[column] > 0]
    monkeypatch.setattr(coupling, "_FEW", few)
    assert winner(law, 7, 11, WHOLE_VOCABULARY) == expected[0]
    assert fastest(law, 7, 11, WHOLE_VOCABULARY, 5) == expected[:5]
