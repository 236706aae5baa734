import json
import re
from itertools import product

import pytest

from bench import tables
from bench.baselines import compared_baselines
from policy.simulation.experiments import BACKLOG


def test_the_measured_tables_of_the_pages_are_those_of_the_records():
    pages = [page.read_text() for page in tables.PAGES]
    assert sorted(place[1] for page in pages for place in tables.PLACE.findall(page)) == sorted(
        tables.TABLES
    )
    assert [tables.rewrite(page) for page in pages] == pages, "run python -m bench.tables"


def test_a_table_of_no_known_name_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        tables.rewrite("<!-- table: nothing -->\n<!-- end -->")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder that tables are made of."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path


def test_records_that_agree_in_processor_length_and_temperature_count_together(
    results, monkeypatch
):
    monkeypatch.setattr(tables, "RECORDS", ("first", "second", "sampled"))
    took = {"none": 8.0, "fixed-a-2": 6.0, "spindle": 4.0}
    fixed = {"workload": "mix", "replies": [{"output_tokens": 10, "total_s": 1.0}]}
    pace = {policy: [{**fixed["replies"][0], "token_s": s}] for policy, s in took.items()}
    runs = [
        {
            **fixed,
            "load": load,
            "block": block,
            "policy": policy,
            "wall_s": took[policy],
            "replies": pace[policy],
        }
        for load, block, policy in product(("closed-4", "poisson-0.50"), (1, 2), took)
    ]
    slower = [{**run, "wall_s": 8.0} for run in runs]
    settings = {"temperature": 0.0, "max_tokens": tables.TOKENS}
    record = {"machine": {"processor": "A CPU (AVX9)"}, "settings": settings, "runs": runs}
    (results / "first.json").write_text(json.dumps(record))
    (results / "second.json").write_text(json.dumps({**record, "runs": slower}))
    (results / "sampled.json").write_text(
        json.dumps({**record, "settings": {**settings, "temperature": 0.8}})
    )
    greedy, between, _, sampled, _, best = tables.speed("AVX9").splitlines()[2:]
    assert greedy.startswith("| plain decoding | 1.41 (")
    assert greedy.endswith("; 4) |")
    assert between == "| plain decoding, between tokens | 2.00 (2.00–2.00; 4) |"
    assert sampled == "| plain decoding, temperature 0.8 | 2.00 (2.00–2.00; 2) |"
    assert best == "| best fixed choice, temperature 0.8 | 1.50 (1.50–1.50; 2) |"
    assert "poisson" not in tables.speed("AVX9")
    longer = {**record, "settings": {**settings, "max_tokens": 128}}
    (results / "second.json").write_text(json.dumps(longer))
    assert "| plain decoding, 128 tokens | 2.00 (2.00–2.00; 2) |" in tables.speed("AVX9")


def test_each_workload_has_its_ratio_and_blocks_and_all_together_have_no_column(results):
    row = {"policy": "spindle", "over": "none", "interval_95": [1.2, 1.5], "blocks": 3}
    rows = [
        {**row, "workload": "chat", "ratio": 1.345},
        {**row, "workload": "sql", "ratio": 2.0, "blocks": 4},
        {**row, "workload": "code", "ratio": 9.0, "blocks": 2},
        {**row, "workload": "sql", "ratio": 9.0, "over": "fixed-a-2"},
        {**row, "workload": "every workload", "ratio": 9.0},
    ]
    (results / f"{tables.WORKLOADS}.json").write_text(json.dumps({"ratios": rows}))
    head, _, found = tables.by_workload().splitlines()
    assert head == "| Spindle's tokens/s over | chat | SQL |"
    assert found == "| plain decoding | 1.34 (1.20–1.50; 3) | 2.00 (1.20–1.50; 4) |"


def test_a_stack_that_was_not_run_leaves_its_cell_empty(results, monkeypatch):
    ratio = {"median": 1.25, "interval_95": [1.1, 1.4], "blocks": 3}
    rows = [
        {"arm": "vllm-plain", "in_flight": 8, "spindle_over": ratio},
        {"arm": "llamacpp-plain", "in_flight": 1, "spindle_over": ratio},
        {"arm": "none", "in_flight": 1, "spindle_over": ratio},
    ]
    record = {"families": [{"family": "smollm2", "rows": rows}], "settings": {}}
    int8 = {"families": [{"family": "smollm2", "rows": rows[:1]}], "settings": {"dtype": "int8"}}
    monkeypatch.setattr(tables, "PEERS", {"any": ("first", "second")})
    (results / "first.json").write_text(json.dumps(record))
    (results / "second.json").write_text(json.dumps(int8))
    assert tables.stacks("any").splitlines() == [
        "| Spindle's tokens/s over | 1 in flight | 8 in flight |",
        "| --- | --- | --- |",
        "| vLLM |  | 1.25 (1.10–1.40) |",
        "| llama.cpp, 4 bits | 1.25 (1.10–1.40) |  |",
        "| vLLM, Spindle in int8 |  | 1.25 (1.10–1.40) |",
    ]


def test_simulated_latency_and_throughput_are_over_the_best_fixed_choice(results):
    ran = [*compared_baselines()][1:]  # the record is older than the first
    names = ["fixed:eagle:3", "adaptive", "oracle", "none", *ran]
    arms = {name: {"latency_s": 2.0, "tokens_per_s": 8.0} for name in names}
    arms["fixed:eagle:3"] = {
        "latency_s": 4.0,
        "tokens_per_s": 10.0,
        "adaptive_over_it": [0.5, 0.4, 0.6],
    }
    points = [{"load": load, "fixed": "fixed:eagle:3", "arms": arms} for load in (0.3, BACKLOG)]
    tuned = {name: name for name in ran}
    missed = {"scenario": "8b", "load": None, "what": "latency", "wanted": "<= 1", "found": "2"}
    record = {
        "comparisons": [{"scenario": "8b", "tuned": tuned, "points": points}],
        "criteria": [{**missed, "met": False}, {**missed, "load": 0.3, "met": True}],
    }
    (results / f"{tables.SIMULATION}.json").write_text(json.dumps(record))
    others = {share: f" | {share:.3f}" * (len(ran) + 2) for share in (0.5, 0.8)}
    heading, _, *rows = tables.simulated_table().split("\n\n")[0].splitlines()
    assert heading.count("|") == 5 + len(ran) + 2
    assert rows == [
        f"| 8b | 0.3 | eagle:3 | 0.500 (0.400–0.600){others[0.5]} |",
        f"| 8b | backlog | eagle:3 | 0.500 (0.400–0.600){others[0.8]} |",
    ]
    assert tables.unmet().splitlines()[2:] == ["| 8b | all | latency: <= 1 | 2 |"]


def test_open_loops_have_a_row_by_load_over_plain_decoding_and_the_fixed_choice(results):
    row = {"policy": "spindle", "interval_95": [1.2, 1.5], "blocks": 3}
    rows = [
        {**row, "over": over, "load": load, "ratio": ratio}
        for over, load, ratio in (
            ("none", "closed-1", 9.0),
            ("none", "poisson-0.50", 1.345),
            ("none", "bursty-0.90", 1.1),
            ("fixed-a-4", "poisson-0.50", 1.25),
            ("fixed-a-4", "bursty-0.90", 0.98),
            ("best fixed choice", "bursty-0.90", 9.0),
        )
    ]
    settings = {"policies": ["fixed-a-4"]}
    rows.append({**rows[1], "policy": "fixed-a-4", "ratio": 9.0})
    (results / f"{tables.OPEN}.json").write_text(json.dumps({"ratios": rows, "settings": settings}))
    head, _, plain, fixed = tables.open_loops().splitlines()
    assert head == (
        "| Spindle's speed over | Poisson arrivals, 0.5 of capacity | bursts, 0.9 of capacity |"
    )
    assert plain == "| plain decoding | 1.34 (1.20–1.50; 3) | 1.10 (1.20–1.50; 3) |"
    assert fixed == "| `a`, 4 tokens | 1.25 (1.20–1.50; 3) | 0.98 (1.20–1.50; 3) |"


def test_what_a_part_is_worth_is_the_mean_over_loads_and_the_most(results):

    def without(ratio):
        return {f"without:{part}": {"adaptive_over_it": [ratio]} for part in tables.PARTS}

    points = [{"load": 0.3, "arms": without(0.8)}, {"load": BACKLOG, "arms": without(1.25)}]
    other = [{"load": 0.95, "arms": without(1.0)}]
    comparisons = [{"scenario": "a", "points": points}, {"scenario": "b", "points": other}]
    (results / f"{tables.WORTH}.json").write_text(json.dumps({"comparisons": comparisons}))
    head, _, first, *_ = tables.worth().splitlines()
    assert head == "| without | a | b | maximum |"
    assert first == "| deviations of requests | 22.5 | 0.0 | 25.0 |"


def test_every_arm_over_traces_is_explained_and_no_loss_is_minus_zero():
    arms = {row["arm"] for name in (tables.TRACES, tables.TRACES_OTHERS) for row in summary(name)}
    assert len(arms) > 20
    page = (tables.PROJECT_ROOT / "docs" / "research" / "traces.md").read_text("utf-8")
    for arm in arms:
        assert re.search(rf"^\| `{re.escape(arm)}` \| [a-zA-Z]", page, re.MULTILINE), arm
    assert "-0.0" not in page


def summary(name):
    return tables.records.read(tables.RESULTS / f"{name}.json")["summary"]
