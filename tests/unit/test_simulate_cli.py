import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from policy import simulate
from policy.simulation.experiments import (
    BACKLOG,
    Result,
    Scenario,
    Task,
    captured,
    compare,
    compared,
)
from policy.simulation.presets import MIXED, llama_8b_h100
from policy.simulation.shift import shift_test
from policy.simulation.statistics import ratio_of_means, ratio_of_rates
from policy.simulation.svg import Line, line_chart, ticks


def test_a_comparison_prints_a_table_and_writes_results_and_a_page_that_needs_nothing_else(
    tmp_path, capsys
):
    arms = "none,fixed:eagle:2"
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    simulate.main(
        [
            "--jobs",
            "1",
            "compare",
            "--rates",
            "8,16",
            "--requests",
            "3",
            "--seeds",
            "0",
            "--arms",
            arms,
            *files,
        ]
    )
    assert "simulated steps a second" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert [point["load"] for point in document["comparisons"][0]["points"]] == [8.0, 16.0]
    page = (tmp_path / "a.html").read_text()
    HTMLParser().feed(page)
    assert page.count("<svg") == page.count("</svg>") == 1
    assert not re.search(r"<script|https?://|<link|<img", page)
    simulate.main(["report", str(tmp_path / "a.json"), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text() == page


def test_recorded_arrivals_are_read_from_json_lines(tmp_path, capsys):
    rows = [
        {"arrival_s": t, "prompt_tokens": 50, "output_tokens": 5, "category": 1}
        for t in (0.0, 1.0, 1.5)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    simulate.main(
        [
            "--jobs",
            "1",
            "compare",
            "--arrivals",
            str(log),
            "--rates",
            "1",
            "--seeds",
            "0",
            "--arms",
            "none",
        ]
    )
    assert "none*" in capsys.readouterr().out
    log.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(ValueError, match="arrival_s"):
        simulate.recorded(str(log))


def test_a_fleet_is_simulated_size_by_size(tmp_path, capsys):
    simulate.main(
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
            "--html",
            str(tmp_path / "f.html"),
        ]
    )
    rows = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert [(row["replicas"], row["requests"]) for row in rows] == [(1, 4), (3, 12)]
    assert "Fleets of llama-8b-h100" in (tmp_path / "f.html").read_text()


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
    assert captured(results, "adaptive", "fixed", 0.5, [3]) == pytest.approx(0.8)
    assert compared(results, "adaptive", "fixed", 0.5, [3]).value == pytest.approx(0.6)
    assert compared(results, "adaptive", "fixed", BACKLOG, [3]).value == pytest.approx(1 / 0.6)


def test_paired_intervals_are_narrower_than_what_both_arms_share():
    rng = np.random.default_rng(0)
    common = [rng.exponential(1.0, 200) for _ in range(3)]
    better = [0.9 * run + 0.01 * rng.random(200) for run in common]
    ratio = ratio_of_means(better, common)
    assert 0.9 < ratio.low <= ratio.value <= ratio.high < 0.92
    unlike = ratio_of_means([rng.exponential(1.0, 200) for _ in range(3)], common)
    assert unlike.high - unlike.low > 0.1


def test_an_interval_of_rates_is_student_s_over_the_logarithms():
    ratio = ratio_of_rates([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    half = 4.303 * np.log(2) / 3**0.5
    assert (ratio.value, ratio.high) == pytest.approx((2.0, 2 * np.exp(half)))


def test_ticks_are_round_and_span_the_range():
    assert ticks(0.0, 1.04) == [0.0, 0.5, 1.0, 1.5]
    assert ticks(0.2, 0.8) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(0.0, 0.0) == [0.0, 1.0]


def test_a_chart_draws_every_line_inside_its_frame_and_escapes_names():
    chart = line_chart(
        "a < b",
        "x",
        "y",
        [Line("<one>", [0, 1], [2.0, 3.0]), Line("two", [0, 1], [0.0, 1.0], dashed=True)],
    )
    assert chart.count("<polyline") == 2
    assert "&lt;one&gt;" in chart
    assert "a &lt; b" in chart
    points = [
        tuple(map(float, point.split(",")))
        for line in re.findall(r'points="([^"]+)"', chart)
        for point in line.split()
    ]
    assert all(64 <= x <= 590 and 34 <= y <= 276 for x, y in points)


def test_a_chart_is_as_wide_as_its_longest_name_wants():
    def width(name):
        return int(
            re.search(
                r'width="(\d+)"', line_chart("title", "x", "y", [Line(name, [0, 1], [0.0, 1.0])])
            )[1]
        )

    assert width("short") == width("as short") == 760
    assert width("a name of forty letters, which is longer") >= 590 + 40 * 6


def test_the_shift_test_sees_the_oracle_follow_at_once_and_no_speculation_never():
    seen = {
        row["arm"]: row
        for row in shift_test(llama_8b_h100(), ["none", "fixed:eagle:8"], 3, 100, 0.0, 0.6)
    }
    assert seen["oracle"]["up"]["steps"] <= 5  # the mean is over five steps
    assert seen["none"]["down"]["steps"] is not None
    assert seen["none"]["up"]["steps"] is None
    assert seen["fixed:eagle:8"]["down"]["steps"] is None


@pytest.mark.medium
def test_a_part_is_taken_away_told_and_drawn(tmp_path, capsys):
    asked = ["--scenarios", "70b-mix", "--parts", "trim", "--seeds", "0", "--requests", "6"]
    files = ["--json", str(tmp_path / "w.json"), "--html", str(tmp_path / "w.html")]
    simulate.main(["--jobs", "1", "worth", *asked, *files])
    assert "without:trim" in capsys.readouterr().out
    (scenario,) = json.loads((tmp_path / "w.json").read_text())["comparisons"]
    assert len(scenario["points"]) == 3
    assert scenario["planning_us"][0][0] == 1
    page = (tmp_path / "w.html").read_text()
    simulate.main(["report", str(tmp_path / "w.json"), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text() == page


@pytest.mark.parametrize(
    ("option", "value"), [("--rates", "3,fast"), ("--rates", "-1"), ("--seeds", "x")]
)
def test_a_list_that_is_none_is_told_by_its_option_and_value(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(["compare", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: invalid {option[2:]} value: '{value}'" in capsys.readouterr().err
