"""The texts and files of an advice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.advise.advice import FAR, Advice
from backend.advise.formats import files
from backend.advise.goodput import PLAIN, Interval, length_at


def _interval_text(one: Interval) -> str:
    if one.high == float("inf"):
        return "not measured"
    text = f"{one.ratio:.2f}x ({one.low:.2f}-{one.high:.2f})"
    return f"{text}, no difference shown" if one.verdict == "no difference shown" else text


def table_text(advice: Advice) -> str:
    """Return the table of the terminal."""
    over = "plain server" if advice.has_plain else "length 0"
    rows = [("in flight", "now", "advised", "over now (90 %)", f"over {over} (90 %)")]
    for row in advice.rows:
        advised = str(row.length) if advice.speculate else "none"
        texts = _interval_text(row.over_now), _interval_text(row.over_none)
        rows.append((str(row.in_flight), str(advice.now), advised, *texts))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, *_sentences(advice)])


def _sentences(advice: Advice) -> list[str]:
    lines = []
    if advice.speculate:
        ranges = ", ".join(f"{r.first} to {r.last}: {r.length}" for r in advice.table)
        lines.append(f"Length by requests in flight: {ranges}.")
    else:
        lines.append("Advised: no speculation; no load is shown to gain from it.")
    if advice.verdict == "no difference shown":
        lines.append("No difference shown from what the server does now.")
    out = advice.held_out
    if out is not None:
        lines.append(
            f"A cell that was left out (length {out.length}, {out.in_flight} in flight): seconds "
            f"{100 * abs(out.seconds - 1):.1f} % off, tokens {100 * abs(out.tokens - 1):.1f} % off."
        )
    return lines + [f"Note: {note}" for note in advice.notes]


def losing_loads(advice: Advice) -> list[str]:
    """Return notes of loads at which a server without a draft beats the advised table."""
    if not (advice.speculate and advice.has_plain):
        return []
    slower = [row.in_flight for row in advice.rows if row.over_none.verdict == "slower"]
    if not slower:
        return []
    loads = ", ".join(map(str, slower))
    return [
        f"at {loads} in flight a server without a draft is faster than any length: length 0 still "
        "carries the draft. Replicas that are always that full should have no speculation."
    ]


def write(
    folder: Path, advice: Advice, about: Mapping[str, Any], spec: Mapping[str, Any]
) -> list[Path]:
    """Write the advice and its files, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    engine, version = about["engine"], about["versions"].get("engine", "")
    fixed = advice.best_fixed
    emitted = advice.goodput.expected[fixed].emitted
    texts = files(advice.table, spec, engine, version, fixed, emitted)
    data = {**about, "spec": dict(spec), **advice.to_dict()}
    texts["advice.json"] = json.dumps(data, indent=1) + "\n"
    picture = _picture(folder / "advice.svg", advice)
    texts["advice.md"] = _page(advice, about, texts, picture=picture)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in sorted(texts)]


def _page(
    advice: Advice, about: Mapping[str, Any], texts: Mapping[str, str], *, picture: bool
) -> str:
    over = "a plain server" if advice.has_plain else "length 0"
    lines = [
        "# Advice on speculation",
        "",
        f"{about['date']}, {about['engine'] or 'unknown engine'} "
        f"{about['versions'].get('engine', '')}, {about['requests']}.",
        "",
        f"| in flight | now | advised | over now | over {over} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in advice.rows:
        advised = row.length if advice.speculate else "none"
        texts_of = f"{_interval_text(row.over_now)} | {_interval_text(row.over_none)}"
        lines.append(f"| {row.in_flight} | {advice.now} | {advised} | {texts_of} |")
    lines += ["", "Intervals are 90 %.", "", *_sentences(advice), ""]
    if picture:
        lines += ["![Tokens a second by requests in flight](advice.svg)", ""]
    for name in ("vllm.txt", "sglang.json", "model.yaml", "model-1.2.yaml", "aiconfigurator.txt"):
        if name in texts:
            lines += [f"## {name}", "", "```", texts[name].rstrip(), "```", ""]
    lines += [
        "Verify the advice before you apply it: `spindle advise verify`. Measure again when the "
        "traffic, the model or the engine changes.",
        "",
    ]
    return "\n".join(lines)


def _picture(path: Path, advice: Advice) -> bool:
    """Draw speed over requests in flight, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    labels = {advice.now: f"now ({advice.now})"}
    if PLAIN in advice.speed:
        labels[PLAIN] = "plain server"
    for arm, label in labels.items():
        if arm in advice.speed:
            axes.plot(advice.flights, advice.speed[arm], label=label)
            axes.fill_between(advice.flights, *advice.bands[arm], alpha=0.2)
    if advice.speculate:
        arms = [length_at(advice.table, n) for n in advice.flights]
        speed = [advice.speed[arm][at] for at, arm in enumerate(arms)]
        bands = [[advice.bands[arm][i][at] for at, arm in enumerate(arms)] for i in (0, 1)]
        axes.plot(advice.flights, speed, label="advised")
        axes.fill_between(advice.flights, bands[0], bands[1], alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens a second")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    return True


def is_far(advice: Advice) -> bool:
    """Return whether the cell that was left out says that the model does not hold here."""
    return advice.held_out is not None and advice.held_out.off > FAR
