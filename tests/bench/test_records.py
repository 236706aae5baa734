"""Records say their commits: those that benches write, and those that pages cite."""

import re
import sys
from pathlib import Path

import pytest

from bench import records

OLD = re.findall(r"^\| \[(\S+)\]", (records.RESULTS / "README.md").read_text(), re.MULTILINE)
"""Records from before commits were recorded."""


def commits(value):
    """Yield the commits anywhere in a record, but in lists of runs only of the first."""
    if isinstance(value, dict):
        if value.get("commit"):
            yield value["commit"]
        for inner in value.values():
            yield from commits(inner)
    elif isinstance(value, list) and value:
        yield from commits(value[0])


def test_every_record_has_a_commit_or_is_listed_as_older():
    files = sorted(records.RESULTS.glob("*.json*"))
    without = [path.name for path in files if not [*commits(records.read(path))]]
    assert without == sorted(OLD)


def test_a_record_is_stamped_and_goes_on_with_another_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--data", "/home/me/traces", "--arm=/home/me/a", "b/c"])
    monkeypatch.setattr(records, "COMMIT", "one")
    record, path = {"runs": [1]}, tmp_path / "new" / "record.json"
    records.write(path, record)
    first = records.read(path)
    assert (first["commit"], first["runs"]) == ("one", [1])
    assert first["command"].endswith(" --data traces --arm=a b/c")
    assert first["machine"]["processor"]
    monkeypatch.setattr(records, "COMMIT", "two-changed")
    records.write(path, records.read(path))
    assert records.read(path)["commit"] == "one two-changed"
    assert records.read(path)["time_utc"] == first["time_utc"]


@pytest.mark.parametrize("path", sorted(Path(records.__file__).parent.rglob("*.py")), ids=str)
def test_no_bench_writes_a_record_past_the_stamp(path):
    if path != Path(records.__file__):
        assert not re.search(r"\b_?(?:out|json|record)\.write_text\(", path.read_text())
