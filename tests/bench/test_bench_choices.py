import json

import pytest

from tests.bench import workloads
from tests.bench.bench_choices import Run, compared, main

FAKE = {
    "target": {"engine": "fake", "step_s": 0.001},
    "drafts": [{"name": "d", "engine": "fake", "agreement": 0.9}, {"name": "lookup", "engine": "lookup"}],
    "policy": {"k_max": 4},
}


def test_a_run_leaves_a_record_that_is_gone_on_with(tmp_path, capsys):
    config, out = tmp_path / "serving.json", tmp_path / "choices.json"
    config.write_text(json.dumps(FAKE))
    size = ["--blocks", "2", "--tuning-blocks", "1", "--max-tokens", "8", "--raw", "--out", str(out)]
    command = ["--config", str(config), "--workloads", "sql", "--in-flight", "1", "3", *size]
    main(command)
    record = json.loads(out.read_text())
    assert [(row["workload"], row["in_flight"]) for row in record["points"]] == [("sql", 1), ("sql", 3)]
    for row in record["points"]:
        assert list(row["arms"]) == ["spindle", "none", "best-d", "best-lookup"]
        assert row["arms"]["none"]["drafted_per_token"] == 0 < row["arms"]["best-d"]["drafted_per_token"]
        assert row["tuned"]["d"]["length"] in (1, 2, 3, 4)
    del record["points"][1]
    out.write_text(json.dumps(record))
    capsys.readouterr()
    main(command)
    assert "1 in flight" not in capsys.readouterr().out
    assert json.loads(out.read_text())["points"][0] == record["points"][0]


def test_a_ratio_is_that_of_the_rates_within_a_block():
    runs = {"spindle": [Run("spindle", 1.0, 20, 8, 4), Run("spindle", 1.0, 30, 8, 4)], "none": [Run("none", 2.0, 20, 0, 0)] * 2}
    figures = compared(runs, seed=0)
    assert figures["none"]["spindle_over_it"] == pytest.approx((2.0 + 3.0) / 2)
    assert figures["none"]["interval_95"] == [2.0, 3.0]
    assert (figures["spindle"]["tokens_per_s"], figures["spindle"]["acceptance"]) == (25.0, 0.5)


def test_the_mix_takes_its_workloads_in_turn(monkeypatch):
    kinds = {name: lambda name=name: [f"{name} {i}" for i in range(3)] for name in workloads.NAMES}
    load = workloads.load

    def small(name, count, seed):
        return load(name, count, seed) if name == workloads.MIX else workloads.Workload(name, tuple(kinds[name]()[:count]), name)

    monkeypatch.setattr(workloads, "load", small)
    messages = load(workloads.MIX, 12, 0).messages
    assert [message.split()[0] for message in messages] == [workloads.NAMES[i % 5] for i in range(12)]
    assert len(set(messages)) == 12
