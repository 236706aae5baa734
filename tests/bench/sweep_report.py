"""A sweep's record as one self-contained page: ``python -m tests.bench.sweep_report RECORD [PAGE] [--pictures FOLDER]``.

With ``--pictures`` the two first figures are also written as RECORD-latency.png and RECORD-throughput.png.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tests.bench.peers import PEERS
from tests.bench.sweep_arms import ADAPTING, NONE, SPINDLE
from tests.bench.sweep_figures import is_closed, level

COLOURS = {NONE: "#555555", "schedule": "#b58900", "ema": "#2a8a57", "smartspec": "#2f6fb2", "spin": "#8a4fb0", SPINDLE: "#c8321e"}
MARKERS = {NONE: "s", "schedule": "v", "ema": "^", "smartspec": "D", "spin": "P", SPINDLE: "o"}
PARTS = {"planning": "#c8321e", "verify": "#2f6fb2", "emit": "#b9b9b9"}
DRAFT_COLOURS = ("#e0a030", "#2a8a57", "#8a4fb0", "#6f5a3a")
STYLE = """
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 12px; margin: .6em 0; }
td.text { white-space: nowrap; } td, th { padding: 2px 7px; text-align: right; border-bottom: 1px solid #e4e4e4; }
td.text, th.text { text-align: left; } .holds { color: #1d7a46; } .missed { color: #b3261e; font-weight: bold; } .open { color: #8a6d00; }
img { max-width: 100%; } .note { color: #555; font-size: 13px; } @media print { img, table { break-inside: avoid; } }
"""
Row = dict[str, Any]


def write_report(record: dict[str, Any], path: Path) -> None:
    """Write the page of a record."""
    made = ((title, note, draw(record)) for title, note, draw in SECTIONS)
    body = "".join(f"<h2>{title}</h2><p class=note>{html.escape(note)}</p>{content}" for title, note, content in made if content)
    head = f"<h1>Load sweep</h1><p class=note>{_provenance(record)}</p>"
    start = f"<!doctype html><html lang=en><meta charset=utf-8><title>Load sweep</title><style>{STYLE}</style>"
    path.write_text(f"{start}<body>{head}{body}</body></html>\n", "utf-8")


def write_pictures(record: dict[str, Any], folder: Path, name: str) -> None:
    """Write the figures that a README shows as PNG, those that the record has."""
    for what, draw in (("latency", latency_figure), ("throughput", throughput_figure)):
        if figure := draw(record):
            figure.savefig(folder / f"{name}-{what}.png", dpi=110, bbox_inches="tight", metadata={"Software": None})
            plt.close(figure)


def _provenance(record: dict[str, Any]) -> str:
    settings, tuning = record["settings"], record.get("tuning", {})
    blocks = {row["warm_blocks"] for row in record["summary"]} or {0}
    capacity = ", ".join(f"{name} {rate:.2f}" for name, rate in record.get("capacity_requests_per_s", {}).items())
    lines = [
        " ".join(record["command"]),
        f"{record['time_utc']}, {record['through']}; seed {settings['seed']}, temperature {settings['temperature']:g}, at most "
        f"{settings['max_tokens']} tokens, {settings['active']} places; warm blocks a point: {min(blocks)} to {max(blocks)}",
        f"capacity of no speculation, requests a second: {capacity}",
        *(f"not run: {name}: {reason}" for name, reason in record.get("skipped", {}).items()),
        *(
            [f"baselines are told: draft {tuning.get('draft')}, length {tuning.get('length')}, by batch size {tuning.get('schedule')}"]
            if tuning
            else []
        ),
        "; ".join(f"{key} {value}" for key, value in record["machine"].items()),
    ]
    return "<br>".join(html.escape(line) for line in lines)


def _points(record: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["workload"], row["load"]) for row in record["summary"]))


def _policies(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in record["summary"]))


def _workloads(record: dict[str, Any], wanted: Callable[[str], bool] = lambda load: True) -> list[str]:
    return list(dict.fromkeys(workload for workload, load in _points(record) if wanted(load)))


def _image(figure: Figure, words: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return f'<img alt="{html.escape(words)}" src="data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _panels(count: int, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(5.2, 3.9 * columns), height * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6")
    return figure, list(axes.flat)


def _line(axis: Axes, policy: str, x: list[float], y: list[float]) -> None:
    if policy in COLOURS:
        width = 2.2 if policy == SPINDLE else 1.4
        axis.plot(x, y, marker=MARKERS[policy], markersize=5, color=COLOURS[policy], linewidth=width, label=policy, zorder=3)
    elif policy in PEERS:
        axis.plot(x, y, marker="x", linestyle=":", color=DRAFT_COLOURS[PEERS.index(policy) % 4], linewidth=1.2, label=policy, zorder=2)
    else:
        axis.plot(x, y, marker=".", color="#cfcfcf", linewidth=0.9, zorder=1)


def _latency(record: dict[str, Any]) -> str:
    figure = latency_figure(record)
    return _image(figure, "mean latency against the rate of requests, by policy") if figure else ""


def latency_figure(record: dict[str, Any]) -> Figure | None:
    """Draw mean latency against the rate of requests, a panel for each workload and kind of arrivals; None without open loops."""
    panels = list(
        dict.fromkeys((row["workload"], row["load"].rpartition("-")[0]) for row in record["summary"] if not is_closed(row["load"]))
    )
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for (workload, kind), axis in zip(panels, axes, strict=False):
        for policy in _policies(record):
            rows = [r for r in record["summary"] if (r["workload"], r["policy"]) == (workload, policy) and r["load"].startswith(f"{kind}-")]
            _line(axis, policy, [level(row["load"]) for row in rows], [row["mean_latency_s"] for row in rows])
        axis.set(title=f"{workload}, {kind}", xlabel="rate, share of capacity", ylabel="mean latency, s", ylim=(0, None))
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def _throughput(record: dict[str, Any]) -> str:
    figure = throughput_figure(record)
    return _image(figure, "tokens per second over no speculation against requests in flight, by policy") if figure else ""


def throughput_figure(record: dict[str, Any]) -> Figure | None:
    """Draw tokens per second over no speculation against requests in flight, a panel for each workload; None without closed loops."""
    names = _workloads(record, is_closed)
    if not names:
        return None
    figure, axes = _panels(len(names))
    for workload, axis in zip(names, axes, strict=False):
        for policy in _policies(record):
            rows = [
                r for r in record["ratios"] if (r["workload"], r["policy"], r["over"]) == (workload, policy, NONE) and is_closed(r["load"])
            ]
            x = [level(row["load"]) for row in rows]
            _line(axis, policy, x, [row["ratio"] for row in rows])
            if policy == SPINDLE:
                for at, row in zip(x, rows, strict=True):
                    if row["interval_95"] and row["interval_95"][1] < 3 * row["ratio"]:
                        axis.plot([at, at], row["interval_95"], color=COLOURS[SPINDLE], linewidth=1, zorder=2)
        axis.axhline(1, color=COLOURS[NONE], linewidth=1)
        axis.set(title=workload, xlabel="requests in flight", ylabel="over no speculation")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def _heat_maps(record: dict[str, Any]) -> str:
    images = []
    for workload in _workloads(record):
        rows = {(r["policy"], r["load"]): r["ratio"] for r in record["ratios"] if r["workload"] == workload and r["over"] == NONE}
        policies, loads = (list(dict.fromkeys(key[axis] for key in rows)) for axis in (0, 1))
        values = np.array([[rows[policy, load] for load in loads] for policy in policies])
        spread = max(0.05, float(np.abs(values - 1).max()))
        figure, axis = plt.subplots(figsize=(1.6 + 0.85 * len(loads), 0.9 + 0.3 * len(policies)), layout="constrained")
        axis.imshow(values, cmap="RdBu", norm=TwoSlopeNorm(1, 1 - spread, 1 + spread), aspect="auto")
        axis.set_xticks(range(len(loads)), loads, rotation=30, ha="right", fontsize=8)
        axis.set_yticks(range(len(policies)), policies, fontsize=8)
        for (row, column), value in np.ndenumerate(values):
            pale = abs(value - 1) < 0.6 * spread
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="black" if pale else "white")
        axis.set_title(workload, fontsize=10)
        images.append(_image(figure, f"speed over no speculation by policy and load, {workload}"))
    return "".join(images)


def _bars(record: dict[str, Any], wanted: list[Row], label: Callable[[Row], str], key: str, colours: dict[str, str]) -> str:
    """Draw a stacked bar a row, of the shares under ``key``."""
    wanted = [row for row in wanted if row[key]]
    if not wanted:
        return ""
    parts = list(dict.fromkeys(part for row in wanted for part in row[key]))
    drafts = [draft["name"] for draft in record["settings"]["config"]["drafts"]]
    colours = colours | {f"{kind}{name}": DRAFT_COLOURS[i % 4] for i, name in enumerate(drafts) for kind in ("", "draft:")}
    figure, axis = plt.subplots(figsize=(8.5, 0.8 + 0.26 * len(wanted)), layout="constrained")
    left = np.zeros(len(wanted))
    for part in parts:
        shares = np.array([row[key].get(part, 0.0) / sum(row[key].values()) for row in wanted])
        axis.barh(range(len(wanted)), shares, left=left, color=colours[part], label=part, height=0.75)
        left += shares
    axis.set_yticks(range(len(wanted)), [label(row) for row in wanted], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _image(figure, key.replace("_", " "))


def _last_workload(record: dict[str, Any]) -> Iterable[Row]:
    names = _workloads(record)
    return (row for row in record["summary"] if row["workload"] == names[-1]) if names else ()


def _time_shares(record: dict[str, Any]) -> str:
    rows = [row for row in _last_workload(record) if row["policy"] in (NONE, *ADAPTING, SPINDLE) and is_closed(row["load"])]
    return _bars(record, rows, lambda row: f"{row['workload']} {row['load']}, {row['policy']}", "step_time_share", PARTS)


def _choices(record: dict[str, Any]) -> str:
    rows = [row for row in record["summary"] if row["policy"] == SPINDLE]
    return _bars(record, rows, lambda row: f"{row['workload']} {row['load']}", "tokens_by_draft", {"none": "#b9b9b9"})


def _positions(record: dict[str, Any]) -> str:
    names = _workloads(record)
    if not names:
        return ""
    figure, axes = _panels(len(names), height=2.8)
    for workload, axis in zip(names, axes, strict=False):
        load = next(load for name, load in _points(record) if name == workload)
        for row in record["summary"]:
            if (row["workload"], row["load"]) == (workload, load) and row["acceptance_by_position"]:
                places = row["acceptance_by_position"]
                _line(axis, row["policy"], [int(place) for place in places], list(places.values()))
        axis.set(title=f"{workload}, {load}", xlabel="position", ylabel="accepted", ylim=(0, 1))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize=8, frameon=False)
    return _image(figure, "acceptance by position and policy")


def _html_table(head: list[str], rows: Iterable[list[Any]], text: int) -> str:
    """Return a table whose first ``text`` columns are words; a cell may be (words, class)."""

    def cell(tag: str, column: int, value: Any) -> str:
        words, kind = value if isinstance(value, tuple) else (value, "")
        kind = kind or ("text" if column < text else "")
        return f'<{tag} class="{kind}">{html.escape(str(words))}</{tag}>'

    lines = ["".join(cell("td", column, value) for column, value in enumerate(row)) for row in rows]
    top = "".join(cell("th", column, value) for column, value in enumerate(head))
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""


def _interval(row: Row) -> str:
    return "one block" if not row["interval_95"] else "{:.3f} to {:.3f}".format(*row["interval_95"])


def _claims(record: dict[str, Any]) -> str:
    rows = record["claims"]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("holds", "open", "missed")}
    line = f"<p>{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}, of {len(rows)}.</p>" if rows else ""
    kinds = Counter((row["over"], row["bar"], row["verdict"]) for row in rows)
    bars = dict.fromkeys((over, bar) for over, bar, _ in kinds)
    cells = ([over, f"{bar:.2f}", *(kinds[over, bar, verdict] for verdict in counts)] for over, bar in bars)
    return line + _html_table(["over", "at least", *counts], cells, 1)


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
    cells = ([r["workload"], r["load"], f"{r['ratio']:.3f}", _interval(r), r["blocks"]] for r in record["noise"])
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
    cells = (
        [
            row["workload"],
            row["load"],
            row["policy"],
            *("" if row[key] is None else format(row[key], form) for key, form in columns.values()),
        ]
        for row in record["summary"]
    )
    return _html_table(["workload", "load", "policy", *columns], cells, 3)


SECTIONS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    (
        "Claims",
        "Spindle's speed over the other's. A claim holds where the 95 % interval clears the bar, is missed where none of it does, and "
        "is open otherwise. The best fixed choice is, for each block, the one that was best in the other blocks.",
        _claims,
    ),
    (
        "Latency against the rate of requests",
        "Mean latency from the scheduled arrival; the rate as a share of what no speculation completes with every place taken. "
        "Grey: fixed choices.",
        _latency,
    ),
    ("Tokens per second against requests in flight", "Closed loop, over no speculation. Grey: fixed choices.", _throughput),
    ("Speed over no speculation", "Closed loop: tokens per second; open loop: tokens per second of latency. 1 is no gain.", _heat_maps),
    ("Where the time of a step goes", "emit: all but planning and the engines: taking requests in, committing, emitting.", _time_shares),
    (
        "Acceptance by position",
        "Share of the tokens proposed at a position that were accepted with all before them.",
        _positions,
    ),
    ("What Spindle chose", "Share of the emitted tokens by the draft of their step.", _choices),
    ("Noise", "The same arm (no speculation) run twice in each block, the second over the first: the A/A run.", _noise),
    ("Every claim", "", _every_claim),
    ("All figures", "Times in seconds, of warm blocks where there are any; cold: mean latency of the first block.", _table),
)


def main() -> None:
    """Write the page of a record, and pictures."""
    parser = argparse.ArgumentParser(description="Write the page of a sweep's record.")
    parser.add_argument("record", type=Path)
    parser.add_argument("page", type=Path, nargs="?", help="default: beside the record")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    record = json.loads(options.record.read_text("utf-8"))
    write_report(record, options.page or options.record.with_suffix(".html"))
    if options.pictures:
        write_pictures(record, options.pictures, options.record.stem)


if __name__ == "__main__":
    main()
