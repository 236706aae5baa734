import json

import pytest

from tests.bench import readme


def test_the_figures_of_readme_are_those_of_the_records():
    text = readme.README.read_text()
    assert {place[1] for place in readme.PLACE.findall(text)} == set(readme.TABLES)
    assert readme.written(text) == text, "run python -m tests.bench.readme"


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
    (tmp_path / "sweep-gpu.json").write_text(json.dumps({"summary": rows}))
    assert "| mix, closed-1 | 1.000 | 1.100 | 1.300 | 1.400 | 1.500 | 1.600 | 1.700 |" in readme.sweep()
    assert readme.sweep().count("not run") == 1
