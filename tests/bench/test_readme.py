import json

import pytest

from tests.bench import readme


def test_the_figures_of_the_pages_are_those_of_the_records():
    pages = [page.read_text() for page in readme.PAGES]
    assert sorted(place[1] for page in pages for place in readme.PLACE.findall(page)) == sorted(readme.TABLES)
    assert [readme.written(page) for page in pages] == pages, "run python -m tests.bench.readme"


def test_a_table_of_no_known_name_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        readme.written("<!-- figures: nothing -->\n<!-- end -->")


def test_a_sweep_that_was_not_run_leaves_its_row_empty_and_a_record_fills_it(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.sweep().count("not run") == 2
    policies = ["none", "fixed-d-1", "fixed-d-2", "schedule", "ema", "smartspec", "spin", "spindle"]
    rows = [
        {"workload": "mix", "load": "closed-1", "policy": policy, "mean_latency_s": 1.0 + place / 10, "warm_blocks": 3}
        for place, policy in enumerate(policies)
    ]
    rows += [{**row, "load": "poisson-0.50"} for row in rows if row["policy"] in ("none", "spindle")]
    (tmp_path / "sweep-gpu.json").write_text(json.dumps({"summary": rows, "machine": {"processor": "A CPU (AVX9)"}}))
    assert "open loop, share of capacity (warm blocks: 3 or more)" in readme.sweep()
    assert "| mix, poisson-0.50 | 1.000 |  |  |  |  |  | 1.700 |" in readme.sweep()
    assert "| mix, closed-1 | 1.000 | 1.100 | 1.300 | 1.400 | 1.500 | 1.600 | 1.700 |" in readme.sweep()
    assert readme.sweep().count("not run") == 1
    (tmp_path / "open-avx2.json").write_text(json.dumps({"summary": rows, "machine": {"processor": "A CPU (AVX2)"}}))
    assert "| AVX2, 2 CPU cores, tritonserver: mean latency, s, closed loop" in readme.sweep()
    assert readme.sweep().count("not run") == 0
    slower = [{**row, "mean_latency_s": 9.0, "load": "closed-1"} for row in rows]
    (tmp_path / "sweep-cpu-avx2.json").write_text(json.dumps({"summary": slower, "machine": {"processor": "A CPU (AVX2)"}}))
    assert readme.sweep().count("| AVX2, 2 CPU cores") == 2, "records of one processor share its two tables"
    assert "| mix, closed-1 | 9.000 | 9.000 |" in readme.sweep()
    assert "| mix, poisson-0.50 | 1.000 |  |" in readme.sweep().split("| AVX2, 2 CPU")[2]


def test_a_sweep_with_other_policies_has_a_row_of_all_its_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert "| not run |" in readme.policies()
    rows = [{"over": "ema", "ratio": 1.25, "interval_95": [1.1, 1.4], "blocks": 7}]
    rows += [{"over": readme.BEST_FIXED, "ratio": 1.5, "interval_95": None, "blocks": 1}]
    for name, overall in (("sweep-cpu", rows), ("open-avx2", [])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"overall": overall, "machine": {"processor": "A CPU (AVX9)"}}))
    assert readme.policies().splitlines()[2:] == ["| AVX9 (warm blocks: 1 to 7) | 1.50 (one block) |  | 1.25 (1.10 to 1.40) |  |  |"]


def test_ablations_and_the_simulation_s_error_are_written_from_their_records(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert "not run" in readme.ablations()
    assert "not run" in readme.simulation()
    row = {"workload": "mix", "load": "closed-1", "part": "trees", "by_default": False, "ratio": 1.07, "interval_95": [1.02, 1.12]}
    record = {"through": "in process", "ablations": [{**row, "blocks": 5}], "machine": {"processor": "A CPU (AVX9)"}}
    (tmp_path / "ablations.json").write_text(json.dumps(record))
    assert "| AVX9: Spindle's speed with a part over that without it (in process; warm blocks: 5) | mix, closed-1 |" in readme.ablations()
    assert "| trees (off by default) | 1.070 (1.020 to 1.120) |" in readme.ablations()
    errors = {("none", True): -0.02, ("fixed-d-1", True): 0.12, ("fixed-d-2", True): 0.04, ("ema", True): 0.01, ("spindle", False): 0.5}
    rows = [{"policy": policy, "below_saturation": below, "error": error} for (policy, below), error in errors.items()]
    (tmp_path / "sweep-cpu.json").write_text(json.dumps({"simulation": rows, "machine": {"processor": "A CPU (AVX9)"}}))
    table = readme.simulation()
    assert "| AVX9: no speculation | 1 of 1 | -2.0% | -2.0% |" in table
    assert "| AVX9: fixed choices | 1 of 2 | +8.0% | +12.0% |" in table
    assert "Spindle" not in table


def test_served_tokens_are_written_by_temperature_with_ratios_of_every_workload(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    ratio = {"load": "closed-4", "interval_95": [1.1, 1.3], "ratio": 1.2}
    record = {
        "machine": {"processor": "A CPU (AVX9)"},
        "settings": {"temperature": 0.0, "max_tokens": 24, "config": {"target": {"model": "models/some-target"}}},
        "summary": [
            {"workload": "sql", "load": "closed-4", "policy": policy, "tokens_per_s": 50.0 + place, "warm_blocks": 1}
            for place, policy in enumerate(("none", "fixed-lookup-2", "spindle"))
        ],
        "ratios": [
            {**ratio, "workload": "sql", "policy": "spindle", "over": "none", "interval_95": None},
            {**ratio, "workload": readme.EVERY, "policy": "fixed-lookup-2", "over": "none", "ratio": 0.9},
            {**ratio, "workload": readme.EVERY, "policy": "spindle", "over": "none"},
            {**ratio, "workload": readme.EVERY, "policy": "spindle", "over": readme.BEST_FIXED, "ratio": 1.3},
        ],
        "noise": [{"workload": "sql", "load": "closed-4", "ratio": 0.995}],
    }
    (tmp_path / "workloads.json").write_text(json.dumps(record))
    sampled = {**record, "settings": {**record["settings"], "temperature": 0.8}}
    (tmp_path / "workloads-sampled.json").write_text(json.dumps(sampled))
    (tmp_path / "tiny.json").write_text(json.dumps(record))
    table = readme.serving()
    assert "| text-to-SQL (own generator), 4 | 50.0 | 51.0 | 52.0 | **1.20** (one block) |  | 0.99 |" in table
    assert "| every workload, 4 |  | 0.90 of none |  | **1.20** (1.10 to 1.30) | **1.30** (1.10 to 1.30) |  |" in table
    assert "| some-target, AVX9: tokens/s at temperature 0.8, by workload" in table


def test_the_headline_is_of_all_closed_loops_that_agree_in_processor_length_and_temperature(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    took = {"none": 8.0, "fixed-a-2": 6.0, "spindle": 4.0}
    runs = [
        {
            "workload": "mix",
            "load": "closed-4",
            "block": block,
            "policy": policy,
            "wall_s": seconds,
            "replies": [{"output_tokens": 10, "total_s": 1.0}],
        }
        for block in (1, 2)
        for policy, seconds in took.items()
    ]
    settings = {"temperature": 0.0, "max_tokens": 24}
    record = {"machine": {"processor": "A CPU (AVX9)"}, "settings": settings, "runs": runs}
    (tmp_path / "workloads.json").write_text(json.dumps(record))
    (tmp_path / "sampled-avx2.json").write_text(json.dumps({**record, "settings": {**settings, "temperature": 0.8}, "runs": runs[:3]}))
    first, best, sampled = readme.headline().splitlines()[2:]
    assert first == "| AVX9, 24 tokens, temperature 0: over no speculation | **2.00** (2.00 to 2.00; 2) |"
    assert best == "| AVX9, 24 tokens, temperature 0: over the best fixed choice | **1.50** (1.50 to 1.50; 2) |"
    assert sampled == "| AVX9, 24 tokens, temperature 0.8: over no speculation | **2.00** (one block) |"
    slower = [{**run, "wall_s": 2.0 * run["wall_s"] if run["policy"] == "spindle" else run["wall_s"]} for run in runs]
    opened = [{**run, "load": "poisson-0.50"} for run in runs]
    (tmp_path / "open-avx2.json").write_text(json.dumps({**record, "runs": [*slower, *opened]}))
    assert readme.headline().splitlines()[2].startswith("| AVX9, 24 tokens, temperature 0: over no speculation | **1.41** (0.")
    assert readme.headline().splitlines()[2].endswith("; 4) |")
    assert "poisson" not in readme.headline()


def test_pictures_that_were_made_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "PICTURES", tmp_path)
    assert "sweep-cpu" not in readme.pictures()
    (tmp_path / "sweep-cpu-speed.png").write_bytes(b"")
    assert "by draft, length and load, AVX512-BF16](docs/pictures/sweep-cpu-speed.png)" in readme.pictures()
    (tmp_path / "sweep-cpu-avx2-speed.png").write_bytes(b"")
    assert readme.pictures().splitlines() == [
        "![speed over no speculation by draft, length and load, AVX2](docs/pictures/sweep-cpu-avx2-speed.png)"
    ]


def test_peers_not_run_leave_one_line_and_a_record_has_a_row_for_each_also_the_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert "not run" in readme.peers()
    assert "not run" in readme.stacks()
    ratio, same = {"median": 1.25, "interval_95": [1.1, 1.4], "blocks": 3}, {"texts": 6, "same": 5}
    row = {
        "arm": "vllm-draft",
        "in_flight": 1,
        "tokens_per_s": 20.4,
        "over_plain": ratio,
        "spindle_over": ratio,
        "as_plain": same,
        "as_none": same,
    }
    rows = [row, {**row, "arm": "none"}, {**row, "arm": "none", "in_flight": 8}]
    family = {
        "family": "tiny",
        "weights": {"vllm-draft": "bf16"},
        "rows": rows,
        "skipped": {"openvino-plain": "no environment"},
        "load_average": [0.1, 2.5],
    }
    (tmp_path / "peers.json").write_text(json.dumps({"families": [family], "machine": {"processor": "A CPU (AVX9)"}}))
    assert "(blocks: 3; load average of the machine: 0.1 to 2.5)" in readme.peers()
    cells = "20 | 1.25 | 1.25 (1.10 to 1.40) | 5 of 6 | 5 of 6"
    assert f"| vllm-draft | bf16 | {cells} |  |  |  |  |  |" in readme.peers()
    assert f"| Spindle, no speculation |  | {cells} | {cells} |" in readme.peers()
    assert "| openvino-plain | not run: no environment |  |" in readme.peers()
    plain = {**row, "arm": "vllm-plain", "spindle_over": {**ratio, "median": 2.0}}
    record = {"families": [{**family, "rows": [*rows, plain]}], "machine": {"processor": "A CPU (AVX9)"}}
    (tmp_path / "peers.json").write_text(json.dumps(record))
    assert "| tiny, AVX9 (blocks: 3) | 1 | 1.25 (1.10 to 1.40) |  | 2.00 (1.10 to 1.40) |  |  |" in readme.stacks()
    assert "| tiny, AVX9 (blocks: 3) | 8 | 1.25 (1.10 to 1.40) |  |  |  |  |" in readme.stacks()
