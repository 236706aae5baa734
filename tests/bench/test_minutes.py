"""The script of the next minutes on a GPU: its limits, its record, and a rehearsal on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from backend import PROJECT_ROOT
from bench.cuda import minutes
from bench.cuda.minutes import PARTS, TimedCommand


def test_a_part_that_takes_too_long_is_killed_and_the_next_one_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(minutes, "_MARGIN_S", 0.1)
    server = TimedCommand("never ends", ("http.server", "0"), 1.5)
    report = minutes.run(server, tmp_path, 60.0, rehearse=False)
    assert report["status"] == "killed after 2 s"
    assert report["command"] == ["python", "-m", "http.server", "0"]
    report = minutes.run(
        TimedCommand("prints", ("platform",), 30.0), tmp_path, 60.0, rehearse=False
    )
    assert report["status"] == "exit status 0"
    assert "Linux" in report["output"]
    assert not any(tmp_path.iterdir())


def test_a_part_has_no_more_time_than_is_left(tmp_path):
    report = minutes.run(PARTS["scripted"], tmp_path, 20.0, rehearse=True)
    assert report["status"] == "no time left"
    assert report["command"][-3:] == ["--seconds", "5", "--rehearse"]


def test_parts_run_in_their_order_and_leave_a_record(monkeypatch, tmp_path):
    monkeypatch.setattr(
        minutes,
        "PARTS",
        {
            "first": TimedCommand("a", ("platform",), 30.0),
            "second": TimedCommand("b", ("json.tool", "FOLDER/nowhere"), 30.0),
            "third": TimedCommand("c", ("platform",), 30.0),
        },
    )
    monkeypatch.setattr(sys, "argv", ["minutes", "second", "first", "--out", str(tmp_path / "out")])
    minutes.main()
    record = json.loads((tmp_path / "out/minutes.json").read_text())
    assert [*record["parts"]] == ["first", "second"]
    first, second = record["parts"].values()
    assert first["status"] == "exit status 0"
    assert second["status"] != "exit status 0"
    assert f"{tmp_path}/out/nowhere" in second["output"]
    assert record["gpu"] == [str(gpu) for gpu in minutes.machine.gpus()]
    assert record["seed"]
    assert record["versions"]["torch"]


WITHOUT_NUMBA = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
PLANS = """
from bench.cuda import PLANNER
assert PLANNER.startswith("plain Python: No module named"), PLANNER
from policy.loops import trim
from policy.loops.compiling import compile_all
compile_all()
assert not hasattr(trim, "signatures")
"""


def test_the_loops_run_uncompiled_where_numba_is_absent():
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA + PLANS], cwd=PROJECT_ROOT, check=True)


@pytest.mark.slow
def test_scripted_policies_run_where_numba_is_absent(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NUMBA)
    command = [sys.executable, "-m", "bench.cuda.scripted", "--rehearse"]
    command += ["--loads", "2", "--policies", "none", "adaptive"]
    command += ["--out", str(tmp_path / "scripted.json")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=PROJECT_ROOT, env=environment, check=True, timeout=300)
    found = json.loads((tmp_path / "scripted.json").read_text())
    assert found["planner"].startswith("plain Python")
    cells = {(cell["policy"], cell["in_flight"]) for cell in found["cells"]}
    assert cells == {("none", 2), ("adaptive", 2)}
    assert found["summary"]["2"]["adaptive_over"].keys() == {"none"}


@pytest.mark.slow
def test_a_rehearsal_runs_every_part_and_all_texts_are_equal(tmp_path):
    command = [sys.executable, "-m", "bench.cuda.minutes", "all", "--rehearse"]
    command += ["--limit", "1500", "--out", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run(command, cwd=PROJECT_ROOT, env=environment, check=True, timeout=1600)
    record = json.loads((tmp_path / "minutes.json").read_text())
    assert [*record["parts"]] == ["doctor", "gate", "served", "scripted", "open"]
    for name, report in record["parts"].items():
        assert report["status"] == "exit status 0", (name, report["output"])
    for part in ("gate", "served"):
        assert json.loads((tmp_path / f"{part}.json").read_text())["differ"] == 0


def test_nothing_is_measured_after_texts_that_differ(monkeypatch, tmp_path):
    parts = {
        "gate": TimedCommand("a", ("json.tool", "FOLDER/nowhere"), 30.0, is_gate=True),
        "figures": TimedCommand("b", ("platform",), 30.0),
    }
    monkeypatch.setattr(minutes, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["minutes", "all", "--out", str(tmp_path)])
    minutes.main()
    assert [*json.loads((tmp_path / "minutes.json").read_text())["parts"]] == ["gate"]
