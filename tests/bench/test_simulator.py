"""The simulator's evidence."""

import json

import numpy as np
import pytest

from bench import records
from bench.simulator.__main__ import main
from bench.simulator.protocol import compare, share_captured
from bench.simulator.shift import shift_test
from policy.simulation.experiments import BACKLOG, Result, Scenario, Task, arm_ratio
from policy.simulation.presets import MIXED, llama_8b_h100


def test_a_fleet_is_simulated_size_by_size(capsys, tmp_path):
    main(
        [
            "--jobs",
            "1",
            "fleet",
            "--replicas",
            "1,3",
            "--arms",
            "none",
            "--requests",
            "4",
            "--json",
            str(tmp_path / "fleet.json"),
        ]
    )
    record = json.loads((tmp_path / "fleet.json").read_text())
    assert record["commit"] == records.commit()
    assert record["machine"]
    rows = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert [(row["replicas"], row["requests"]) for row in rows] == [(1, 4), (3, 12)]


def test_choices_are_made_on_the_tuning_seeds_alone():
    scenario = Scenario("made up", llama_8b_h100(), MIXED)
    asked = []

    def run(scenario, tasks):
        asked.append(tasks)
        return {
            task: result(
                1.0 if task.arm in {"fixed:1b:2", "schedule:1b"} and task.seed < 3 else 2.0
            )
            for task in tasks
        }

    comparison = compare(scenario, [0.5, BACKLOG], [0, 1], [3, 4], run)
    assert comparison.fixed == {0.5: "fixed:1b:2", BACKLOG: "fixed:1b:2"}
    assert comparison.tuned["schedule"] == "schedule:1b"
    assert [{task.seed for task in tasks} for tasks in asked] == [{0, 1}, {3, 4}]
    assert {"adaptive", "oracle", "none"} <= {task.arm for task in asked[1]}


def result(latency_s, tokens_per_s=None):
    latencies = latency_s * np.ones(40)
    return Result(latencies, latencies, tokens_per_s or 1 / latency_s, 1, 1.0, 1.0, 1.0)


def test_the_captured_share_is_that_of_the_way_from_fixed_to_oracle():
    latency_s = {"adaptive": 1.2, "fixed": 2.0, "oracle": 1.0}
    results = {
        Task(arm, load, 3): result(s) for arm, s in latency_s.items() for load in (0.5, BACKLOG)
    }
    assert share_captured(results, "adaptive", "fixed", 0.5, [3]) == pytest.approx(0.8)
    assert arm_ratio(results, "adaptive", "fixed", 0.5, [3]).value == pytest.approx(0.6)
    assert arm_ratio(results, "adaptive", "fixed", BACKLOG, [3]).value == pytest.approx(1 / 0.6)


def test_the_shift_test_sees_the_oracle_follow_at_once_and_no_speculation_never():
    seen = {
        row["arm"]: row
        for row in shift_test(llama_8b_h100(), ["none", "fixed:eagle:8"], 3, 100, 0.0, 0.6)
    }
    assert seen["oracle"]["up"]["steps"] <= 5  # the mean is over five steps
    assert seen["none"]["down"]["steps"] is not None
    assert seen["none"]["up"]["steps"] is None
    assert seen["fixed:eagle:8"]["down"]["steps"] is None


@pytest.mark.slow
def test_a_part_is_taken_away(tmp_path, capsys):
    asked = ["--scenarios", "70b-mix", "--parts", "trim", "--seeds", "0", "--requests", "6"]
    files = ["--json", str(tmp_path / "w.json")]
    main(["--jobs", "1", "worth", *asked, *files])
    assert "without:trim" in capsys.readouterr().out
    (scenario,) = json.loads((tmp_path / "w.json").read_text())["comparisons"]
    assert len(scenario["points"]) == 3
    assert scenario["planning_us"][0][0] == 1
