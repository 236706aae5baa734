"""A sweep's record as one self-contained page: ``python -m bench.sweep.report RECORD [PAGE]``.

The ablations that the record lacks, and all peers, are those of ``ablations.json`` and
``peers.json`` among the other results, if there.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from bench import records
from bench.records import RESULTS
from bench.sweep import plots
from bench.sweep.figures import is_closed
from bench.sweep.simulation import WITHIN

STYLE = """
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; }
td.text { white-space: nowrap; } td, th { padding: 2px 7px; text-align: right; border-bottom: 1px solid #e4e4e4; }
td.text, th.text { text-align: left; } .holds { color: #1d7a46; } .missed { color: #b3261e; font-weight: bold; } .open { color: #8a6d00; }
img { max-width: 100%; } .note { color: #555; font-size: 13px; } @media print { img, table { break-inside: avoid; } }
"""
Row = dict[str, Any]


def write_report(record: dict[str, Any], path: Path, results: Path = RESULTS) -> None:
    """Write the page of a record."""
    families = [
        family for other in _companions(record, results, "peers") for family in other["families"]
    ]
    record = {**record, "ablations": _ablations_of(record, results), "peers": families}
    sections = ((title, note, draw(record)) for title, note, draw in SECTIONS)
    body = "".join(
        f"<h2>{title}</h2><p class=note>{html.escape(note)}</p>{content}"
        for title, note, content in sections
        if content
    )
    head = f"<h1>Load sweep</h1><p class=note>{_provenance(record)}</p>"
    start = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Load "
        f"sweep</title><style>{STYLE}</style>"
    )
    path.write_text(f"{start}<body>{head}{body}</body></html>\n", "utf-8")


def _companions(record: dict[str, Any], results: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of the results, NAME.json and NAME-*.json, that were made on the record's
    processor.
    """
    others = [records.read(path) for path in sorted(results.glob(f"{name}*.json*"))]
    return [
        other for other in others if other["machine"]["processor"] == record["machine"]["processor"]
    ]


def _ablations_of(record: dict[str, Any], results: Path) -> list[Row]:
    return record.get("ablations") or [
        row for other in _companions(record, results, "ablations") for row in other["ablations"]
    ]


def _provenance(record: dict[str, Any]) -> str:
    settings, tuning = record["settings"], record.get("tuning", {})
    blocks = {row["warm_blocks"] for row in record["summary"]} or {0}
    capacity = ", ".join(
        f"{name} {rate:.2f}" for name, rate in record.get("capacity_requests_per_s", {}).items()
    )
    lines = [
        command if isinstance(command := record["command"], str) else " ".join(command),
        f"{record['time_utc']}, {record['through']}; seed {settings['seed']}, temperature "
        f"{settings['temperature']:g}, at most "
        f"{settings['max_tokens']} tokens, {settings['active']} places, prefixes "
        f"{settings.get('prefix', 'cold')}; "
        f"warm blocks a point: {min(blocks)} to {max(blocks)}",
        f"capacity of no speculation, requests a second: {capacity}",
        *(f"not run: {name}: {reason}" for name, reason in record.get("skipped", {}).items()),
        *(
            [
                f"baselines are given: draft {tuning.get('draft')}, length "
                f"{tuning.get('length')}, by batch size {tuning.get('schedule')}"
            ]
            if tuning
            else []
        ),
        "; ".join(f"{key} {value}" for key, value in record["machine"].items()),
    ]
    return "<br>".join(html.escape(line) for line in lines)


def _image(figure: Figure | None, words: str) -> str:
    """Return a figure inside the page, '' for none."""
    if figure is None:
        return ""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return (
        f'<img alt="{html.escape(words)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )


def _figure(
    draw: Callable[[dict[str, Any]], Figure | None], words: str
) -> Callable[[dict[str, Any]], str]:
    return lambda record: _image(draw(record), words)


def _html_table(head: list[str], rows: Iterable[list[Any]], text: int) -> str:
    """Return a table whose first ``text`` columns are words; a cell may be (words, class)."""

    def cell(tag: str, column: int, value: Any) -> str:
        words, kind = value if isinstance(value, tuple) else (value, "")
        kind = kind or ("text" if column < text else "")
        return f'<{tag} class="{kind}">{html.escape(str(words))}</{tag}>'

    lines = ["".join(cell("td", column, value) for column, value in enumerate(row)) for row in rows]
    top = "".join(cell("th", column, value) for column, value in enumerate(head))
    return (
        f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
        if lines
        else ""
    )


def _interval(row: Row) -> str:
    return "one block" if not row["interval_95"] else "{:.3f} to {:.3f}".format(*row["interval_95"])


def _claims(record: dict[str, Any]) -> str:
    rows = record["claims"]
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows)
        for verdict in ("holds", "open", "missed")
    }
    line = (
        f"<p>{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}, of "
        f"{len(rows)}.</p>"
        if rows
        else ""
    )
    kinds = Counter((row["over"], row["bar"], row["verdict"]) for row in rows)
    bars = dict.fromkeys((over, bar) for over, bar, _ in kinds)
    cells = (
        [over, f"{bar:.2f}", *(kinds[over, bar, verdict] for verdict in counts)]
        for over, bar in bars
    )
    return line + _html_table(["over", "at least", *counts], cells, 1)


def _overall(record: dict[str, Any]) -> str:
    cells = (
        [r["over"], f"{r['ratio']:.3f}", _interval(r), r["blocks"]]
        for r in record.get("overall", [])
    )
    return _html_table(["over", "ratio", "95 % interval", "blocks"], cells, 1)


def _every_claim(record: dict[str, Any]) -> str:
    head = ["workload", "load", "over", "at least", "ratio", "95 % interval", "blocks", ""]
    cells = (
        [
            r["workload"],
            r["load"],
            r["over"],
            f"{r['bar']:.2f}",
            f"{r['ratio']:.3f}",
            _interval(r),
            r["blocks"],
            (r["verdict"], r["verdict"]),
        ]
        for r in record["claims"]
    )
    return _html_table(head, cells, 3)


def _noise(record: dict[str, Any]) -> str:
    cells = (
        [r["workload"], r["load"], f"{r['ratio']:.3f}", _interval(r), r["blocks"]]
        for r in record["noise"]
    )
    return _html_table(["workload", "load", "ratio", "95 % interval", "blocks"], cells, 2)


def _table(record: dict[str, Any]) -> str:
    columns = {
        "mean": ("mean_latency_s", ".3f"),
        "p50": ("p50_latency_s", ".3f"),
        "p99": ("p99_latency_s", ".3f"),
        "cold": ("cold_mean_latency_s", ".3f"),
        "first p50": ("first_token_p50_s", ".3f"),
        "first p99": ("first_token_p99_s", ".3f"),
        "inter-token": ("inter_token_s", ".4f"),
        "tokens/s": ("tokens_per_s", ".1f"),
        "accepted": ("acceptance", ".2f"),
        "drafted/token": ("draft_tokens_per_emitted_token", ".2f"),
        "wasted/token": ("wasted_draft_tokens_per_token", ".2f"),
        "step pred./meas.": ("predicted_over_measured_step_time", ".2f"),
        "looping": ("looping_share", ".2f"),
        "text as none": ("same_text_as_none", ".2f"),
    }
    tables = []
    for title, closed in (("closed loop", True), ("open loop", False)):
        rows = [row for row in record["summary"] if is_closed(row["load"]) is closed]
        cells = (
            [
                row["workload"],
                row["load"],
                row["policy"],
                *(
                    "" if row[key] is None else format(row[key], form)
                    for key, form in columns.values()
                ),
            ]
            for row in rows
        )
        tables += (
            [f"<h3>{title}</h3>", _html_table(["workload", "load", "policy", *columns], cells, 3)]
            if rows
            else []
        )
    return "".join(tables)


def _ablations(record: dict[str, Any]) -> str:
    rows = record["ablations"]
    head = [
        "part",
        "by default",
        "workload",
        "load",
        "with it over without",
        "95 % interval",
        "blocks",
    ]
    cells = (
        [
            r["part"],
            "on" if r["by_default"] else "off",
            r["workload"],
            r["load"],
            f"{r['ratio']:.3f}",
            _interval(r),
            r["blocks"],
        ]
        for r in rows
    )
    return _html_table(head, cells, 4)


def _peers(record: dict[str, Any]) -> str:
    """Return a table of ``peers.json`` for each family of weights, and what was skipped and why."""
    return "".join(_family(family) for family in record["peers"])


def _family(family: dict[str, Any]) -> str:
    head = [
        "workload",
        "arm",
        "in flight",
        "tokens/s",
        "mean, s",
        "over its own plain",
        "Spindle over it",
        "text as its plain",
        "text as none",
    ]
    cells = (
        [
            row["workload"],
            row["arm"],
            row["in_flight"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['mean_latency_s']:.3f}",
            *(_median(row[key]) for key in ("over_plain", "spindle_over")),
            *(f"{row[key]['same']} of {row[key]['texts']}" for key in ("as_plain", "as_none")),
        ]
        for row in family["rows"]
    )
    skipped = "; ".join(f"{name}: {reason}" for name, reason in family["skipped"].items())
    return (
        f"<h3>{html.escape(family['family'])}</h3>{_html_table(head, cells, 2)}"
        + f"<p class=note>{html.escape(skipped)}</p>" * bool(skipped)
    )


def _median(ratio: dict[str, Any]) -> str:
    ends = ratio["interval_95"]
    return f"{ratio['median']:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def _simulation(record: dict[str, Any]) -> str:
    if why := record.get("simulation_missing"):
        return f"<p>Not simulated: {html.escape(why)}.</p>"
    rows = record.get("simulation", [])
    near = [abs(row["error"]) <= WITHIN for row in rows if row["below_saturation"]]
    line = (
        f"<p>Below saturation {sum(near)} of {len(near)} points are within {WITHIN:.0%}.</p>"
        if near
        else ""
    )
    constants = record.get("simulation_constants", {})
    note = f"<p class=note>{html.escape(', '.join(f'{key} {_constant(value)}' for key, value in constants.items()))}</p>"
    head = [
        "workload",
        "load",
        "policy",
        "measured, s",
        "simulated, s",
        "error",
        "of steps",
        "of a step's time",
        "",
    ]
    cells = (
        [
            r["workload"],
            r["load"],
            r["policy"],
            f"{r['measured_s']:.3f}",
            f"{r['predicted_s']:.3f}",
            *(f"{r[key]:+.1%}" for key in ("error", "steps_error", "step_time_error")),
            "" if r["below_saturation"] else "saturated",
        ]
        for r in rows
    )
    return line + note + _html_table(head, cells, 3) if rows else ""


def _constant(value: Any) -> str:
    return (
        ", ".join(f"{name} {each:.3g}" for name, each in value.items())
        if isinstance(value, dict)
        else f"{value:.3g}"
    )


SECTIONS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    (
        "Claims",
        "Spindle's speed over the other's. A claim holds where the 95 % interval clears the bar, "
        "is missed where none of it does, and "
        "is open otherwise. The best fixed choice is, for each block, the one that was best in "
        "the other blocks.",
        _claims,
    ),
    (
        "All loads together",
        "Spindle's speed over the other's; a warm block of any point is a pair.",
        _overall,
    ),
    (
        "Latency against the rate of requests",
        "Mean latency from the scheduled arrival; the rate as a share of what no speculation "
        "completes with every place taken. "
        "Grey: fixed choices.",
        _figure(plots.latency_figure, "mean latency against the rate of requests, by policy"),
    ),
    (
        "Tokens per second against requests in flight",
        "Closed loop, over no speculation. Grey: fixed choices.",
        _figure(
            plots.throughput_figure,
            "tokens per second over no speculation against requests in flight, by policy",
        ),
    ),
    (
        "What Spindle chose",
        "Share of the emitted tokens by the draft of their step.",
        _figure(plots.choices_figure, "share of tokens by draft and point"),
    ),
    (
        "What each part brings",
        "Spindle's speed with a part over its speed without it, and 95 % intervals; parts are "
        "taken away one by one, those that are off "
        "by default are added. "
        "Of this record or, where it has none, of docs/results/ablations*.json on this processor.",
        _ablations,
    ),
    (
        "Other stacks",
        "The same weights and prompts on the same processor: docs/results/peers*.json.",
        _peers,
    ),
    (
        "Where the time of a step goes",
        "emit: all but planning and the engines: taking requests in, committing, emitting.",
        _figure(plots.time_shares_figure, "share of step time by part"),
    ),
    (
        "Simulation against measurement",
        "Mean latency from policy.simulation with the tables as served, the same requests and "
        "the acceptance that the fixed choices saw; "
        "constants measured once, on the cold block.",
        _simulation,
    ),
    (
        "Noise",
        "The same arm (no speculation) run twice in each block, the second over the first: the "
        "A/A run.",
        _noise,
    ),
    ("Every claim", "", _every_claim),
    (
        "All figures",
        "Times in seconds, of warm blocks where there are any; cold: mean latency of the first "
        "block.",
        _table,
    ),
)


def main() -> None:
    """Write the page of a record."""
    parser = argparse.ArgumentParser(description="Write the page of a sweep's record.")
    parser.add_argument("record", type=Path)
    parser.add_argument("page", type=Path, nargs="?", help="default: next to the record")
    options = parser.parse_args()
    record = records.read(options.record)
    write_report(record, options.page or options.record.with_suffix(".html"))


if __name__ == "__main__":
    main()
