import json
from dataclasses import replace

import numpy as np
import pytest

from policy.latency import (
    LatencyCurve,
    LatencyError,
    LatencyModel,
    LatencyTable,
    Provenance,
)

PROVENANCE = Provenance(
    "bench-1", "cpu", "smollm2-135m", "ab12", "bfloat16", 2, "2026-01-31", "2.13.0"
)


def table(**changes):
    columns = {
        "rows": (1, 1, 2, 2),
        "tokens": (1, 2, 2, 8),
        "context_tokens": (64, 64, 128, 128),
        "seconds": (0.01, 0.011, 0.012, 0.02),
    }
    return LatencyTable("target", **{**columns, **changes}, provenance=PROVENANCE)


def measured(engine, cost, cells):
    """A table whose cell (rows, tokens, context) takes cost(rows, tokens, context)."""
    rows, tokens, context = zip(*cells, strict=True)
    return LatencyTable(engine, rows, tokens, context, tuple(cost(*cell) for cell in cells))


def test_a_table_survives_json():
    assert LatencyTable.from_dict(json.loads(json.dumps(table().to_dict()))) == table()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 1}, ["schema", "1"]),
        ({"engine": ""}, ["engine", "''"]),
        ({"tokens": [1, 2]}, ["rows", "2", "4"]),
        ({"tokens": []}, ["tokens", "none"]),
        ({"tokens": [1, 2, 2, 0]}, ["tokens[3]", "target", "0"]),
        ({"tokens": "1234"}, ["tokens", "'1234'"]),
        ({"rows": [1, 1, 2, 9]}, ["rows[3]", "9", "8"]),
        ({"context_tokens": [64, 64, -1, 128]}, ["context_tokens[2]", "-1"]),
        ({"seconds": [0.01, float("nan"), 0.1, 0.1]}, ["seconds[1]", "nan"]),
        ({"seconds": [0.01, 0.1, 0.1]}, ["seconds", "4", "3"]),
        ({"seconds": [0.01, 0.1, "fast", 0.1]}, ["seconds[2]", "'fast'"]),
        ({"provenance": []}, ["provenance", "[]"]),
        ({"colour": 1}, ["colour", "1"]),
    ],
)
def test_a_malformed_table_is_refused_by_field_and_value(change, words):
    with pytest.raises(LatencyError) as error:
        LatencyTable.from_dict({**table().to_dict(), **change})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("field", ["engine", "seconds", "provenance"])
def test_a_missing_field_is_named(field):
    data = table().to_dict()
    del data[field]
    with pytest.raises(LatencyError, match=field):
        LatencyTable.from_dict(data)


@pytest.mark.parametrize(("field", "value"), [("threads", "2"), ("machine", 7), ("threads", True)])
def test_a_malformed_provenance_is_named(field, value):
    data = table().to_dict()
    data["provenance"][field] = value
    with pytest.raises(LatencyError) as error:
        LatencyTable.from_dict(data)
    assert f"provenance.{field}" in str(error.value)
    assert repr(value) in str(error.value)


def test_a_curve_goes_through_monotone_measurements():
    seconds = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.019, 9: 0.030, 16: 0.031}
    curve = LatencyCurve.fit(LatencyTable.synthetic("target", seconds))
    assert [curve.seconds(t) for t in seconds] == pytest.approx(list(seconds.values()))
    assert curve.seconds(6) == pytest.approx(0.015)


def test_noise_that_falls_is_levelled_and_never_negative():
    noisy = {1: 0.011, 2: 0.009, 3: 0.010, 4: 0.012, 8: 0.008}
    curve = LatencyCurve.fit(LatencyTable.synthetic("target", noisy))
    base = curve.base(np.arange(200))
    assert (np.diff(base) >= -1e-15).all()
    assert (base > 0).all()
    assert curve.seconds(1) == pytest.approx(curve.seconds(3))


def test_a_count_takes_what_the_next_width_does():
    table = LatencyTable.synthetic("e", {1: 1.0, 4: 2.0, 16: 4.0, 64: 8.0})
    curve = LatencyCurve.fit(replace(table, widths=(1, 4, 16, 64)))
    assert [curve.at(count) for count in (1, 2, 4, 5, 16, 17, 64)] == pytest.approx(
        [1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    )
    assert LatencyTable.from_dict(replace(table, widths=(1, 4)).to_dict()).widths == (1, 4)
    with pytest.raises(LatencyError, match=r"widths must be rising and positive, got \[4, 1\]"):
        replace(table, widths=(4, 1))


def test_a_cell_counts_at_the_width_that_ran():
    # 3 tokens ran 4 wide and 40 tokens 64 wide; 80 tokens are wider than any width.
    table = LatencyTable.synthetic("e", {1: 1.0, 3: 2.0, 40: 8.0, 80: 9.0})
    curve = LatencyCurve.fit(replace(table, widths=(1, 4, 64)))
    assert [curve.at(count) for count in (1, 2, 4, 5, 64, 80)] == pytest.approx(
        [1.0, 2.0, 2.0, 8.0, 8.0, 9.0]
    )


def test_a_table_without_widths_is_of_an_engine_that_pads_nothing():
    data = LatencyTable.synthetic("e", {1: 1.0}).to_dict()
    del data["widths"]
    assert LatencyTable.from_dict(data).widths == ()


def test_beyond_the_grid_the_last_octave_goes_on():
    curve = LatencyCurve.fit(
        LatencyTable.synthetic("target", {1: 0.01, 32: 0.01, 48: 0.014, 64: 0.014})
    )
    assert curve.seconds(96) == pytest.approx(0.018)


def test_one_cell_makes_a_constant():
    curve = LatencyCurve.fit(LatencyTable.synthetic("lookup", {1: 2e-5}))
    assert curve.seconds(1) == curve.seconds(1000) == pytest.approx(2e-5)


def test_rows_and_context_are_distinguished_where_they_were_varied():
    cells = [
        (rows, tokens, rows * context)
        for rows in (1, 2, 8)
        for tokens in (8, 16, 32)
        for context in (64, 1024)
    ]
    curve = LatencyCurve.fit(
        measured(
            "target",
            lambda rows, tokens, context: 0.01 + 1e-4 * tokens + 2e-4 * rows + 1e-7 * context,
            cells,
        )
    )
    assert curve.row_s == pytest.approx(2e-4, rel=1e-6)
    assert curve.context_s == pytest.approx(1e-7, rel=1e-6)
    assert curve.seconds(16, 4, 4096) == pytest.approx(0.01 + 16e-4 + 8e-4 + 4.096e-4)


def test_what_each_proposed_token_reads_is_distinguished_from_what_each_row_reads():
    cells = [(1, length, context) for length in (0, 3, 7) for context in (64, 512, 1536)]
    cells += [(4, 1, 512), (8, 3, 200)]
    rows, lengths, contexts = (np.array(column) for column in zip(*cells, strict=True))
    tokens, read = rows * (1 + lengths), rows * contexts
    again = rows * lengths * contexts
    seconds = 0.01 + 1e-4 * tokens + 1e-7 * read + 3e-7 * again
    columns = (tuple(column.tolist()) for column in (rows, tokens, read, seconds))
    table = LatencyTable("target", *columns, node_context_tokens=tuple(again.tolist()))
    assert LatencyTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    curve = LatencyCurve.fit(table)
    assert curve.context_s == pytest.approx(1e-7, rel=1e-6)
    assert curve.node_context_s == pytest.approx(3e-7, rel=1e-6)
    assert curve.seconds(8, 1, 1000, 7000) == pytest.approx(0.01 + 8e-4 + 1e-4 + 21e-4)


def test_a_cost_that_falls_with_rows_counts_as_none():
    cells = [(rows, tokens, 0) for rows in (1, 8) for tokens in (8, 16)]
    curve = LatencyCurve.fit(
        measured("target", lambda rows, tokens, _: 0.01 + 1e-4 * tokens - 1e-4 * rows, cells)
    )
    assert curve.row_s == 0.0
    assert curve.base_s.min() > 0


def test_rows_that_vary_only_with_tokens_are_left_in_the_base():
    curve = LatencyCurve.fit(
        measured("draft", lambda rows, *_: 0.001 * rows, [(n, n, 0) for n in (1, 2, 4, 8)])
    )
    assert curve.row_s == 0.0
    assert curve.seconds(4, 4) == pytest.approx(0.004)


def test_a_model_without_a_table_names_the_engines():
    known = LatencyTable.synthetic("x", {1: 0.1})
    with pytest.raises(LatencyError, match="no latency table for small, large"):
        LatencyModel.from_tables(known, {"small": None, "mid": known, "large": None})
    with pytest.raises(LatencyError, match="target"):
        LatencyModel.from_tables(None, {})


def test_a_negative_overhead_is_refused():
    with pytest.raises(LatencyError, match=r"overhead_s.*-1"):
        LatencyModel.from_tables(LatencyTable.synthetic("x", {1: 0.1}), {}, overhead_s=-1)
