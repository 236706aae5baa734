"""The GPU script, rehearsed on the CPU as on a bare machine: no package but torch and NumPy can be
imported.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu import run
from tests.gpu.policies import ACCEPTANCE, DRAFTS, Script
from tests.gpu.run import PARTS, ROOT

BARE = """
from importlib.machinery import PathFinder

LACKING = {"safetensors", "pytest", "_pytest", "transformers", "tokenizers", "yaml", "tqdm",
           "tritonclient", "gguf", "llguidance", "opentelemetry", "fastapi", "scipy", "requests",
           "grpc", "matplotlib", "hypothesis", "openvino"}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda _, name, *more: None if name.partition(".")[0] in LACKING else find(name, *more)
)
"""
ENVELOPE = {
    "part",
    "what",
    "status",
    "command",
    "seed",
    "rehearsal",
    "expected_s_on_h200",
    "limit_s",
    "wall_s",
    "versions",
}
LOADS, ARMS = 2, 10


def rehearse(parts, out, **environment):
    command = [sys.executable, "-m", "tests.gpu.run", *parts, "--out", str(out), "--rehearse"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}, ended.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What the whole rehearsal leaves on a bare machine."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE)
    found, printed = rehearse(["all"], folder, PYTHONPATH=str(folder))
    return found, printed


@pytest.mark.slow
def test_every_part_leaves_its_file_and_says_how_long_it_is_expected_to_take(bare):
    found, printed = bare
    assert set(found) == set(PARTS)
    for name, part in PARTS.items():
        report = found[name]
        assert set(report) >= ENVELOPE
        assert report["command"][:4] == ["python", "-m", "tests.gpu.run", name]
        assert report["expected_s_on_h200"] <= part.limit_s <= 9 * 60
        assert report["versions"]["torch"]
        assert f"about {part.expected_s} s on an H200" in printed
        assert report["machine"]["processor"]


@pytest.mark.slow
def test_what_lacks_packages_says_which_and_the_others_run_without(bare):
    found, _ = bare
    lacking = {
        name: report["error"]
        for name, report in found.items()
        if report["status"] == "lacks packages"
    }
    assert lacking == {
        "b": "not installed here: pytest",
    }
    assert {report["status"] for name, report in found.items() if name not in lacking} == {"ok"}, (
        found
    )
    assert found["b"]["result"]["difference"] < 1e-9  # found before pytest was wanted


@pytest.mark.slow
def test_the_parts_find_what_they_are_for(bare):
    found = {name: report.get("result") for name, report in bare[0].items()}
    assert found["a"]["copy_gb_s"] > 0
    assert found["a"]["weight_gb_s"].keys() == {"1", "8", "64", "256"}
    steps = found["c"]["steps"]
    assert found["c"]["left_out"] == 0
    assert not [row for row in steps if "error" in row]
    for varied, values in {
        "shape": 2,
        "context": 2,
        "batch": 2,
        "k": 4,
        "chunk": 2,
    }.items():
        assert len({row[varied] for row in steps}) == values
    assert all(row["operators"] > 0 for row in found["c"]["launches"])
    assert all(row["share"] > 0 and row["floor_ms"] > 0 for row in found["d"]["steps"])
    assert found["e1"]["tables"].keys() == {"target", "large", "small"}
    assert len(found["e2"]["cells"]) == ARMS * LOADS
    for cell in found["e2"]["cells"]:
        assert cell["tokens_per_s"] > 0
        most = 1 if cell["policy"] == "none" else 9
        assert 0.5 <= cell["tokens_per_step_and_row"] <= most
    assert all(load["adaptive_over_best_fixed"] > 0 for load in found["e2"]["summary"].values())


@pytest.mark.slow
def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path):
    found, printed = rehearse(["e2", "a"], tmp_path)
    assert found["e2"]["status"] == "failed"
    assert "run part e1 into the same folder first" in found["e2"]["error"]
    assert "e2: failed" in printed
    assert found["a"]["status"] == "ok"


@pytest.mark.parametrize("draft", DRAFTS)
def test_made_up_acceptance_is_as_often_as_it_says_and_the_same_for_whoever_asks(draft):
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


def test_a_part_takes_no_longer_than_it_may():
    assert run.limit_of("b", 50, rehearse=False) == 50
    assert run.limit_of("a", 500, rehearse=False) == PARTS["a"].limit_s
    assert run.limit_of("b", None, rehearse=True) == PARTS["b"].rehearsal_s


def test_a_part_whose_time_is_up_is_killed_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(run.PARTS, "c", run.PARTS["c"]._replace(rehearsal_s=0.2))
    report = run.run("c", tmp_path, rehearse=True)
    assert report["status"] == "killed after 0.2 s"
    assert set(report) >= ENVELOPE - {"versions"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_failure_in_the_file(tmp_path):
    report = run.run("a", tmp_path, rehearse=False)
    assert report["status"] == "failed"
    assert "torch sees no CUDA GPU here; --rehearse" in report["error"]


def test_everything_that_it_needs_is_small_enough_to_carry():
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    needed = [
        name
        for name in tracked
        if name.startswith(("policy/", "backend/", "engines_build/", "tests/", "pyproject"))
    ]
    others = ("engines_build/drafts/smollm2",)
    size = sum(
        (ROOT / name).stat().st_size
        for name in needed
        if not name.startswith(others) and (ROOT / name).is_file()
    )
    assert 0 < size < 64 << 20
