"""The document of a simulation as text for a terminal and as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from .experiments import BACKLOG
from .shift import PHASES
from .svg import Line, line_chart

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d1d1f; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-top: 1px solid #ddd; padding-top: 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
tr:has(td.first) td { border-top: 2px solid #bbb; } th { background: #f5f5f5; }
td.met { color: #1d7a3a; } td.missed { color: #b3261e; font-weight: 600; }
td.text, td.found { white-space: normal; } td.found { max-width: 24em; }
.scroll { overflow-x: auto; } .note { color: #555; } svg text { font: 11.5px system-ui, sans-serif; fill: #333; }
svg .title { font-size: 13.5px; font-weight: 600; } svg .grid { stroke: #e6e6e6; } svg .axis { stroke: #777; }
"""


_TEXT = {"arm", "way", "what", "point", "not used"}


def load_name(load: float) -> str:
    """Return how a load is written."""
    return "backlog" if load == BACKLOG else f"{load:g}"


def text(comparison: dict[str, Any]) -> str:
    """Return a comparison as a plain table: by load and arm latency, throughput and what adaptive
    makes of it.
    """
    lines = [
        f"{comparison['scenario']}: {comparison['provenance']}",
        f"load 1 = {comparison['rate_hz']:.3g} requests/s",
    ]
    width = max(17, *(len(arm) for point in comparison["points"] for arm in point["arms"])) + 1
    columns = f"{'latency s':>10} {'p95 s':>8} {'tokens/s':>9} {'rows':>6} {'k':>5}"
    lines.append(f"{'load':>8} {'arm':{width}} {columns}  adaptive over it (95 %)")
    for point in comparison["points"]:
        for arm, row in point["arms"].items():
            value, low, high = row["adaptive_over_it"]
            mark = "*" if arm == point["fixed"] else " "
            lines.append(
                f"{load_name(point['load']):>8} {arm + mark:{width}} {row['latency_s']:10.3f} "
                f"{row['latency_p95_s']:8.3f} "
                f"{row['tokens_per_s']:9.1f} {row['rows']:6.1f} {row['length']:5.2f}  "
                f"{value:.3f} ({low:.3f} to {high:.3f})"
            )
    return "\n".join(lines)


def html(document: dict[str, Any]) -> str:
    """Return the whole document as one self-contained page."""
    body = [
        "<h1>Simulated deployments</h1>",
        f"<p class='note'>{escape(document['command'])}<br>{document['steps']:,} steps in "
        f"{document['wall_s']:.0f} s of "
        f"{document['jobs']} processes: {document['steps_per_s']:,.0f} simulated steps a second. "
        f"Idle time is skipped.</p>",
    ]
    if rows := document.get("criteria"):
        body += ["<h2>Wanted and found</h2>", _criteria(rows)]
    for comparison in document.get("comparisons", []):
        body.append(_comparison(comparison))
    if shifts := document.get("shift"):
        body.append(_shift(shifts))
    if fleet := document.get("fleet"):
        body.append(_fleet(fleet))
    head = f"<meta charset='utf-8'><title>Simulated deployments</title><style>{_STYLE}</style>"
    return (
        f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(
        f"<th{' class=text' if name in _TEXT else ''}>{escape(name)}</th>" for name in header
    )
    body = "".join(
        "<tr>"
        + "".join(cell if cell.startswith("<td") else f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _criteria(rows: list[dict[str, Any]]) -> str:
    met = sum(row["met"] for row in rows)
    cells = [
        [
            row["scenario"],
            "all" if row["load"] is None else load_name(row["load"]),
            f"<td class='text'>{escape(row['what'])}</td>",
            f"<td class='found'>{escape(row['wanted'])}</td>",
            f"<td class='found'>{escape(row['found'])}</td>",
            "<td class='met'>met</td>" if row["met"] else "<td class='missed'>missed</td>",
        ]
        for row in rows
    ]
    return f"<p>{met} of {len(rows)} met.</p>" + _table(
        ["scenario", "load", "what", "wanted", "found (95 %)", ""], cells
    )


def _comparison(comparison: dict[str, Any]) -> str:
    loads = [point for point in comparison["points"] if point["load"] != BACKLOG]
    parts = [f"<h2>{escape(comparison['scenario'])}</h2>"]
    parts.append(
        f"<p class='note'>{escape(comparison['provenance'])}. Load 1 is "
        f"{comparison['rate_hz']:.3g} requests a second, what the best fixed "
        f"choice serves. Policies read times that are off by up to "
        f"{comparison['table_error']:.0%}. Chosen on seeds "
        f"{comparison['tuning_seeds']}, reported on {comparison['reporting_seeds']}, "
        f"{comparison['requests']} requests a run.</p>"
    )
    if len(loads) > 1:
        parts.append(_latency_chart(loads))
    rows = []
    for point in comparison["points"]:
        for index, (arm, row) in enumerate(point["arms"].items()):
            value, low, high = row["adaptive_over_it"]
            rows.append(
                [
                    f"<td class='{'first' if index == 0 else ''}'>{load_name(point['load'])}</td>",
                    f"<td class='text'>{escape(arm)}{' (best fixed)' if arm == point['fixed'] else ''}</td>",
                ]
                + [f"{row[key]:.4g}" for key in ("latency_s", "latency_p95_s", "first_token_s")]
                + [
                    f"{row['tokens_per_s']:.4g}" if row["tokens_per_s"] else "-",
                    f"{row['rows']:.1f}",
                    f"{row['length']:.2f}",
                ]
                + ["" if arm == "adaptive" else f"{value:.3f} ({low:.3f} to {high:.3f})"]
            )
    header = [
        "load",
        "arm",
        "latency s",
        "p95 s",
        "first token s",
        "tokens/s queued",
        "rows",
        "mean k",
        "adaptive over it (95 %)",
    ]
    note = "<p class='note'>The last column compares latency, in a backlog throughput.</p>"
    return "".join(parts) + _table(header, rows) + note


def _latency_chart(points: list[dict[str, Any]]) -> str:
    """Return the arms that are there at every load, over the best fixed choice."""
    names = [
        arm
        for arm in points[0]["arms"]
        if arm not in {"none", points[0]["fixed"]} and all(arm in point["arms"] for point in points)
    ]
    lines = []
    for name in sorted(names, key=lambda arm: arm != "adaptive")[:9]:
        y = [
            point["arms"][name]["latency_s"] / point["arms"][point["fixed"]]["latency_s"]
            for point in points
        ]
        lines.append(Line(name, [point["load"] for point in points], y, dashed=name in {"oracle"}))
    return line_chart(
        "Mean latency over that of the best fixed choice", "load", "ratio", lines, from_zero=False
    )


def _shift(shifts: list[dict[str, Any]]) -> str:
    parts = ["<h2>Acceptance 0.9, 0.1, 0.9</h2>"]
    for tokens in sorted({shift["output_tokens"] for shift in shifts}):
        chosen = [shift for shift in shifts if shift["output_tokens"] == tokens]
        first = min(shift["seed"] for shift in chosen)
        lines = [
            Line(
                s["arm"],
                s["curve"]["seconds"],
                s["curve"]["length"],
                dashed=s["arm"] == "oracle",
                points=False,
            )
            for s in chosen
            if s["seed"] == first
        ]
        parts.append(
            line_chart(
                f"Mean length, requests of {tokens} tokens",
                "seconds",
                "proposed tokens a row",
                lines,
            )
        )
    rows = []
    for shift in shifts:
        cells = [
            str(shift["output_tokens"]),
            f"<td class='text'>{escape(shift['arm'])}</td>",
            str(shift["seed"]),
        ]
        for phase in PHASES:
            found = shift[phase]
            cells.append(
                "never"
                if found["steps"] is None
                else f"{found['steps']} steps, {found['seconds']:.2f} s"
            )
            cells.append(f"{found['near_share']:.0%}")
        rows.append(cells)
    header = ["tokens", "arm", "seed", "start", "near", "0.9 to 0.1", "near", "0.1 to 0.9", "near"]
    note = (
        "<p class='note'>Until the mean length is within a token of the oracle's; near: share "
        "of the phase's steps.</p>"
    )
    return "".join(parts) + _table(header, rows) + note


def _fleet(fleet: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['replicas']:,}",
            f"<td class='text'>{escape(row['arm'])}</td>",
            f"{row['requests']:,}",
        ]
        + [f"{row[key]:,.4g}" for key in ("latency_s", "latency_p95_s")]
        + [f"{row['tokens_per_s']:,.0f}", f"{row['steps']:,}"]
        for row in fleet["rows"]
    ]
    header = [
        "replicas",
        "arm",
        "requests",
        "latency s",
        "p95 s",
        "tokens/s while requests arrive",
        "steps",
    ]
    return f"<h2>{escape(fleet['title'])}</h2><p class='note'>{escape(fleet['note'])}</p>" + _table(
        header, rows
    )
