"""The pictures of README, light and dark: ``python -m bench.pictures`` writes them to
docs/pictures.

``speed``: tokens per second relative to plain decoding, from the records of README's tables.
``policies``, ``peers``: Spindle's speed over that of other policies and of other servers.
``simulation``: simulated against measured latency.
``traces``: policies over traces of a real target (docs/research/traces.md).
``how-it-works``: one request's way through the service, drawn by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from backend import PROJECT_ROOT
from bench import records
from bench.records import RESULTS
from bench.sweep.arms import NONE, SPINDLE, fixed_choice
from bench.sweep.figures import BEST_FIXED, block_speeds, blocks, interval, level
from bench.tables import (
    HEADLINE,
    OTHERS,
    OVER,
    RECORDS,
    TOKENS,
    TRACES,
    WITH_PEERS,
    over_stacks,
    processor_of,
    read_speeds,
)
from bench.traces import pictures as traces

PICTURES = PROJECT_ROOT / "docs" / "pictures"
THEMES = {
    "light": {
        "ink": "#1f2328",
        "faint": "#59636e",
        "line": "#0969da",
        "band": "#d6dae0",
        "box": "#f6f8fa",
        "edge": "#d1d9e0",
    },
    "dark": {
        "ink": "#f0f6fc",
        "faint": "#9198a1",
        "line": "#4493f8",
        "band": "#3d444d",
        "box": "#151b23",
        "edge": "#3d444d",
    },
}
"""Colours on GitHub's own backgrounds, white and #0d1117."""

Ratios = dict[str, dict[int, list[float]]]
Over = list[tuple[str, float, tuple[float, float] | None]]
"""A comparison: the other side, how many times as fast Spindle is, and the 95 % interval."""


def greedy(processor: str) -> list[dict[str, Any]]:
    """Return the records of README's tables of a processor: greedy, of ``TOKENS`` a request."""
    every = (records.read(RESULTS / f"{name}.json") for name in RECORDS)
    return [
        record
        for record in every
        if processor_of(record) == processor
        and record["settings"]["temperature"] == 0
        and record["settings"]["max_tokens"] == TOKENS
    ]


def ratios(sweeps: Iterable[dict[str, Any]]) -> Ratios:
    """Return {policy: {requests in flight: speed over plain decoding in each warm block}} of
    Spindle and the fixed choices, the blocks of all sweeps together.
    """
    by_policy: Ratios = {}
    for record in sweeps:
        policies = list(dict.fromkeys(run["policy"] for run in record["runs"]))
        policies_shown = [name for name in policies if name == SPINDLE or name.startswith("fixed-")]
        for (_, load), speeds in block_speeds(blocks(record["runs"], policies), policies).items():
            for policy in policies_shown:
                by_policy.setdefault(policy, {}).setdefault(int(level(load)), []).extend(
                    ours / plain for ours, plain in zip(speeds[policy], speeds[NONE], strict=True)
                )
    return by_policy


def mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def speed(by_policy: Ratios, theme: dict[str, str]) -> Figure:
    """Draw Spindle's line over the band of the fixed choices, worst to best; a dot a measured
    block.
    """
    loads = sorted(by_policy[SPINDLE])
    means = {policy: [mean(series[load]) for load in loads] for policy, series in by_policy.items()}
    fixed = {policy: series for policy, series in means.items() if policy != SPINDLE}
    figure, axis = plt.subplots(figsize=(7.2, 3.3), layout="constrained")
    x = range(len(loads))
    low, high = np.min([*fixed.values()], axis=0), np.max([*fixed.values()], axis=0)
    axis.fill_between(x, low, high, color=theme["band"], linewidth=0, zorder=1)
    axis.plot(
        [0, len(loads) - 1],
        [1, 1],
        color=theme["faint"],
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=2,
    )
    axis.plot(x, means[SPINDLE], color=theme["line"], linewidth=2.5, zorder=3)
    for place, load in enumerate(loads):
        series = by_policy[SPINDLE][load]
        axis.plot(
            [place] * len(series),
            series,
            "o",
            color=theme["line"],
            markersize=5,
            alpha=0.55,
            zorder=4,
        )
        is_last = place == len(loads) - 1  # the band's names are right of it
        axis.annotate(
            f"{means[SPINDLE][place]:.2f}",
            (place, means[SPINDLE][place]),
            (-8, 9) if is_last else (8, 3),
            textcoords="offset points",
            ha="right" if is_last else "left",
            color=theme["line"],
            weight="bold",
            zorder=5,
        )
    _frame(axis, loads, theme)
    _labels(axis, means, theme)
    return figure


def _labels(axis: Axes, means: dict[str, list[float]], theme: dict[str, str]) -> None:
    """Name the line, and the band's edges by the choices that are best and worst where they end,
    each next to its end and none on top of another.
    """
    ends = {policy: series[-1] for policy, series in means.items()}
    fixed = sorted((policy for policy in ends if policy != SPINDLE), key=ends.__getitem__)
    edges = {fixed[0]: "worst", fixed[-1]: "best"}
    low, high = axis.get_ylim()
    right, below = len(means[SPINDLE]) - 1 + 0.07, low
    for policy in sorted((SPINDLE, *edges), key=ends.__getitem__):
        at = max(ends[policy], below)
        below = at + 0.07 * (high - low)
        if policy == SPINDLE:
            words, colour = "Spindle", theme["line"]
        else:
            draft, length = fixed_choice(policy)
            words, colour = f"{edges[policy]} fixed: {draft}, {length} tokens", theme["faint"]
        weight = "bold" if policy == SPINDLE else "normal"
        axis.text(right, at, words, va="center", color=colour, weight=weight)
    axis.text(-0.12, 1 - 0.015 * (high - low), "plain decoding", color=theme["faint"], va="top")


def _frame(axis: Axes, loads: list[int], theme: dict[str, str]) -> None:
    axis.set_xticks(range(len(loads)), [f"{load} in flight" for load in loads])
    axis.set_xlim(-0.15, len(loads) - 1 + 0.95)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.08 * (high - low))  # room for the figures
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_ylabel("tokens/s over plain decoding")
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=theme["ink"])
    axis.yaxis.label.set_color(theme["ink"])


def over_policies() -> Over:
    """Return Spindle over the other policies, all loads of all greedy sweeps together."""
    by_over: dict[str, tuple[list[float], list[float]]] = {}
    for (processor, temperature, _, over), loads in read_speeds().items():
        is_shown = processor == HEADLINE and over in (BEST_FIXED, *OTHERS)
        if is_shown and not temperature:
            ours, theirs = by_over.setdefault(over, ([], []))
            for spindle, other in loads.values():
                ours += spindle
                theirs += other
    rows = {over: interval(*pair) for over, pair in by_over.items()}
    return [
        ((OVER | OTHERS)[over], rows[over]["ratio"], rows[over]["interval_95"])
        for over in (BEST_FIXED, *OTHERS)
        if over in rows
    ]


def over_peers() -> dict[str, Over]:
    """Return Spindle over the other servers, by how many requests are in flight."""
    panels: dict[str, Over] = {}
    for (name, at), speeds in sorted(over_stacks(WITH_PEERS).items(), key=lambda row: row[0][1]):
        row = (name, speeds["median"], speeds["interval_95"])
        panels.setdefault(f"{at} in flight", []).append(row)
    return panels


def comparison(panels: dict[str, Over], theme: dict[str, str]) -> Figure:
    """Draw a dot and its interval for each row, on a line of equal speed; a panel a title, with the
    rows of the first.
    """
    names = [name for name, _, _ in next(iter(panels.values()))]
    size = 7.2, 0.7 + 0.34 * len(names)
    figure, axes = plt.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        axis.axvline(1, color=theme["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for name, ratio, ends in rows:
            place, (low, high) = names.index(name), ends or (ratio, ratio)
            colour = theme["line"] if low > 1 or high < 1 else theme["faint"]
            axis.plot([low, high], [place, place], color=colour, linewidth=2.5, zorder=2)
            axis.plot(ratio, place, "o", color=colour, markersize=8, zorder=3)
            axis.annotate(
                f"{ratio:.2f}",
                (max(high, 1), place),  # right of the line of equal speed, too
                (8, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                weight="bold",
            )
        axis.set_title(title, color=theme["ink"], fontsize="medium")
        axis.margins(x=0.16, y=0.08)
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axis.tick_params(length=0, colors=theme["ink"])
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    figure.supxlabel(
        "Spindle's speed over it, with 95 % interval", color=theme["ink"], fontsize="medium"
    )
    return figure


def simulation(rows: list[dict[str, Any]], theme: dict[str, str]) -> Figure:
    """Draw simulated against measured mean latency in a band of 10 %: a dot a policy and load, open
    where it is saturated.
    """
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    ends = np.array([0.85, 1.18]) * np.quantile([row["measured_s"] for row in rows], [0, 1])
    axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color=theme["band"], linewidth=0, zorder=1)
    axis.plot(ends, ends, color=theme["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    labels = {"Spindle": theme["line"], "other policies": theme["faint"]}
    for row in sorted(rows, key=lambda row: bool(row["policy"] == SPINDLE)):
        label = "Spindle" if row["policy"] == SPINDLE else "other policies"
        filled = labels[label] if row["below_saturation"] else "none"
        at = row["measured_s"], row["predicted_s"]
        axis.plot(*at, "o", markersize=7, color=labels[label], markerfacecolor=filled, zorder=3)
    for label, colour in labels.items():
        axis.plot([], [], "o", color=colour, label=label)
    axis.legend(frameon=False, labelcolor=theme["ink"], loc="upper left")
    axis.set(xscale="log", yscale="log")
    for side, words in ((axis.xaxis, "measured"), (axis.yaxis, "simulated")):
        side.set_label_text(f"{words} mean latency, s", color=theme["ink"])
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(StrMethodFormatter("{x:g}"))
        side.set_minor_locator(NullLocator())
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=theme["ink"])
    return figure


BOX = """<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="{edge}"/>"""


def how_it_works(theme: dict[str, str]) -> str:
    """Return the diagram as SVG, 800 wide."""
    ink, faint, line = theme["ink"], theme["faint"], theme["line"]
    parts: list[str] = []

    def box(
        x: int, y: int, w: int, h: int, *, fill: str = theme["box"], edge: str = theme["edge"]
    ) -> None:
        parts.append(BOX.format(x=x, y=y, w=w, h=h, fill=fill, edge=edge))

    def words(
        x: int, y: int, *lines: str, bold: bool = False, colour: str = faint, size: int = 12
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        for number, text in enumerate(lines):
            parts.append(
                f'<text x="{x}" y="{y + 16 * number}" fill="{colour}" '
                f'font-size="{size}"{weight}>{text}</text>'
            )

    def arrow(path: str, *, both: bool = False) -> None:
        start = ' marker-start="url(#a)"' if both else ""
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line}" stroke-width="2" '
            f'marker-end="url(#a)"{start}/>'
        )

    def head(x: int, y: int, title: str, *lines: str) -> None:
        words(x, y, title, bold=True, colour=ink, size=14)
        words(x, y + 19, *lines, size=11)

    box(10, 110, 120, 130)
    head(70, 145, "clients", "HTTP, gRPC,", "OpenAI;", "streaming or not")
    box(180, 60, 170, 230)
    head(265, 86, "tritonserver", "thin Python models:")
    for number, name in enumerate(("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "spindle")):
        box(195, 120 + 40 * number, 140, 30, fill="none")
        words(265, 140 + 40 * number, name, colour=ink)
    box(400, 10, 390, 330)
    head(595, 36, "engine process", "requests join and leave the batch between two steps")
    steps = (
        (420, 80, "1  plan", "for each request: which", "draft, how many tokens"),
        (610, 80, "2  draft", "a head on the target and", "suffix over earlier texts"),
        (610, 200, "3  verify", "the target checks the", "whole batch in one pass"),
        (420, 200, "4  commit", "take what was accepted,", "learn from it and the time"),
    )
    for x, y, title, *lines in steps:
        box(x, y, 160, 80, edge=line)
        head(x + 80, y + 27, title, *lines)
    arrow("M 582 120 H 604")
    arrow("M 690 162 V 194")
    arrow("M 608 240 H 586")
    arrow("M 500 198 V 166")
    words(595, 312, "where a draft would not pay: 0 tokens, plain decoding")
    arrow("M 136 175 H 174", both=True)
    arrow("M 356 175 H 394", both=True)
    marker = f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{line}"/>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 350" width="800" height="350" '
        'role="img" text-anchor="middle"'
        ' font-family="-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        "<title>How a request is served</title>\n"
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" '
        'markerHeight="5" orient="auto-start-reverse">'
        f"{marker}</marker></defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    """Write all pictures."""
    sweep = records.read(RESULTS / "policies-avx512.json")
    replayed = records.read(RESULTS / f"{TRACES}.json")
    by_policy = ratios(greedy(HEADLINE))
    mpl.rcParams.update({"svg.hashsalt": "spindle", "font.size": 11})
    for name, theme in THEMES.items():
        figures = {
            "speed": speed(by_policy, theme),
            "policies": comparison({"": over_policies()}, theme),
            "peers": comparison(over_peers(), theme),
            "simulation": simulation(sweep["simulation"], theme),
            "traces": traces.picture(replayed["summary"], theme),
        }
        for kind, figure in figures.items():
            path: Path = PICTURES / f"{kind}-{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)
        (PICTURES / f"how-it-works-{name}.svg").write_text(how_it_works(theme), "utf-8")


if __name__ == "__main__":
    main()
