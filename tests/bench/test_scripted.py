"""Policies on scripted acceptance, rehearsed on a CPU."""

import json
import subprocess
import sys

import pytest

from backend.config import PROJECT_ROOT
from bench.cuda.scripted import ACCEPTANCE, DRAFTS, Script

ARMS, LOADS = 10, 2


@pytest.mark.slow
def test_a_rehearsal_measures_tables_and_serves_every_policy(tmp_path):
    out = tmp_path / "scripted.json"
    command = [sys.executable, "-m", "bench.cuda.scripted", "--rehearse", "--out", str(out)]
    subprocess.run(command, cwd=PROJECT_ROOT, check=True, timeout=300)
    found = json.loads(out.read_text())
    assert found["tables"].keys() == {"target", "large", "small"}
    assert len(found["cells"]) == ARMS * LOADS
    for cell in found["cells"]:
        assert cell["tokens_per_s"] > 0
        most = 1 if cell["policy"] == "none" else 9
        assert 0.5 <= cell["tokens_per_step_and_row"] <= most
    assert all(load["adaptive_over_best_fixed"] > 0 for load in found["summary"].values())


@pytest.mark.parametrize("draft", DRAFTS)
def test_scripted_acceptance_is_as_often_as_it_says_and_the_same_for_every_policy(draft):
    one, other = Script(), Script()
    for parity, rate in enumerate(ACCEPTANCE[draft]):
        right = asked = 0
        for number in range(100 + parity, 300, 2):
            text = one.text(number)
            assert other.text(number) == text
            for start in (0, 3, 40):
                assert (
                    one.proposal(number, draft, start, 8)
                    == other.proposal(number, draft, 0, 48)[start : start + 8]
                )
            proposed = one.proposal(number, draft, 0, len(text))
            right, asked = right + sum(map(int.__eq__, proposed, text)), asked + len(text)
        assert abs(right / asked - rate) < 0.02
