"""Policies on scripted acceptance, rehearsed on a CPU."""

import json
import subprocess
import sys

import pytest
import torch

from backend import PROJECT_ROOT
from backend.engines.cuda.plain import mix
from bench.cuda import script_kernels
from bench.cuda.script import HARD_SHARE, SECOND_SHARE, Rates, choices_of, tokens_of
from bench.simulator import device_step

ARMS, LOADS = 11, 2


@pytest.mark.slow
def test_a_rehearsal_measures_tables_and_serves_every_policy(tmp_path):
    out = tmp_path / "scripted.json"
    command = [sys.executable, "-m", "bench.cuda.scripted", "--rehearse", "--out", str(out)]
    command += ["--open", "0.5"]
    subprocess.run(command, cwd=PROJECT_ROOT, check=True, timeout=300)
    found = json.loads(out.read_text())
    assert found["tables"].keys() == {"target", "large", "small"}
    closed = [cell for cell in found["cells"] if cell["in_flight"]]
    opened = [cell for cell in found["cells"] if cell["share"]]
    assert len(closed) == ARMS * LOADS
    assert len(opened) == ARMS
    assert all(cell["requests_per_s"] > 0 for cell in opened)
    for cell in closed:
        assert cell["tokens_per_s"] > 0
        most = 1 if cell["policy"] == "none" else 9
        assert 0.5 <= cell["tokens_per_step_and_row"] <= most
    for load in ("1", "4"):
        row = found["summary"][load]
        assert row["adaptive_over"][row["best_fixed"]] > 0
        assert len(row["adaptive_over"]) == ARMS - 1


def test_virtual_time_has_the_same_script():
    assert (device_step.HARD_SHARE, device_step.SECOND_SHARE) == (HARD_SHARE, SECOND_SHARE)


@pytest.mark.parametrize("number", [1, 2])
def test_heads_are_right_as_often_as_their_rates_say(number):
    rates, vocab = Rates(0.9, 0.4), 1000
    seed = mix(torch.arange(400)).repeat_interleave(50)
    place = torch.arange(50).repeat(400)
    token, chance = choices_of(seed, place, number, rates, vocab)
    right = tokens_of(seed, place, vocab)
    assert len(right.unique()) == vocab
    for is_even, rate in ((True, rates.even), (False, rates.odd)):
        rows = (seed % 2 == 0) == is_even
        share = (1 - HARD_SHARE / 2) * rate
        is_right = (token == right[:, None])[rows].float()
        assert float(is_right[:, 0].mean()) == pytest.approx(share, abs=0.02)
        assert torch.allclose(is_right[:, :2].mean(0), chance[rows, :2].mean(0), atol=0.02)
        assert not is_right[:, 2:].any()
    again, _ = choices_of(seed, place, number, rates, vocab)
    assert torch.equal(again, token)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:triton.runtime.interpreter")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning:triton.runtime.interpreter")
def test_the_script_is_the_same_in_one_kernel():
    seed, place, rates = mix(torch.arange(300)), torch.arange(300) // 3, Rates(0.9, 0.65)
    assert torch.equal(script_kernels.tokens(seed, place, 128256), tokens_of(seed, place, 128256))
    shares = HARD_SHARE, SECOND_SHARE
    token, chance = script_kernels.choices(seed, place, 2, (0.9, 0.65), shares, 1000)
    wanted, likely = choices_of(seed, place, 2, rates, 1000)
    assert torch.equal(token, wanted)
    torch.testing.assert_close(chance, likely)
