"""The pictures of README, light and dark: ``python -m bench.pictures`` writes them to
docs/pictures.

``speed``: tokens per second relative to plain decoding, from docs/results/sweep-cpu-avx2.json.
``policies``, ``peers``: Spindle's speed over that of other policies and of other servers.
``how-it-works``: one request's way through the service, drawn by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from backend.triton_adapter.paths import PROJECT_ROOT
from bench import records
from bench.sweep.arms import ADAPTING, NONE, SPINDLE, fixed_choice
from bench.sweep.figures import BEST_FIXED, block_speeds, blocks, level
from bench.sweep.readme import STACKS

RECORD = PROJECT_ROOT / "docs" / "results" / "sweep-cpu-avx2.json"
PEERS = PROJECT_ROOT / "docs" / "results" / "peers-smollm2-avx2.json"
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

POLICIES = {
    BEST_FIXED: "the best fixed choice",
    "schedule": "table by batch size",
    "ema": "acceptance EMA",
    "smartspec": "SmartSpec",
    "spin": "SPIN's selection",
}

Ratios = dict[str, dict[int, list[float]]]
Over = list[tuple[str, float, tuple[float, float] | None]]
"""What Spindle is compared with, how many times as fast it is, and the 95 % interval."""


def ratios(record: dict[str, Any]) -> Ratios:
    """Return {policy: {requests in flight: speed over plain decoding in each warm block}}."""
    policies = list(dict.fromkeys(run["policy"] for run in record["runs"]))
    found: Ratios = {
        policy: {} for policy in policies if policy == SPINDLE or policy.startswith("fixed-")
    }
    for (_, load), speeds in block_speeds(blocks(record["runs"], policies), policies).items():
        for policy, own in found.items():
            own[int(level(load))] = [
                ours / plain for ours, plain in zip(speeds[policy], speeds[NONE], strict=True)
            ]
    return found


def mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def speed(found: Ratios, theme: dict[str, str]) -> plt.Figure:
    """Draw Spindle's line over the band of the fixed choices, worst to best; a dot a measured
    block.
    """
    loads = sorted(found[SPINDLE])
    means = {policy: [mean(own[load]) for load in loads] for policy, own in found.items()}
    fixed = {policy: own for policy, own in means.items() if policy != SPINDLE}
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
        own = found[SPINDLE][load]
        axis.plot(
            [place] * len(own), own, "o", color=theme["line"], markersize=5, alpha=0.55, zorder=4
        )
        words = f"{means[SPINDLE][place]:.2f}"
        axis.annotate(
            words,
            (place, max(own)),
            (0, 7),
            textcoords="offset points",
            ha="center",
            color=theme["line"],
            weight="bold",
        )
    _labels(axis, fixed, theme, len(loads))
    _frame(axis, loads, theme)
    return figure


def _labels(axis: Axes, fixed: dict[str, list[float]], theme: dict[str, str], count: int) -> None:
    """Name the line and the band's edges where they end, by the choice that is best and worst
    there.
    """
    worst, best = (
        min(fixed, key=lambda policy: fixed[policy][-1]),
        max(fixed, key=lambda policy: fixed[policy][-1]),
    )

    def named(policy: str) -> str:
        draft, length = fixed_choice(policy)
        return f"{draft}, {length} tokens"

    end, faint = count - 1 + 0.07, theme["faint"]
    axis.text(end, 1.065, "Spindle", color=theme["line"], va="center", weight="bold")
    axis.text(end, 0.995, f"best fixed: {named(best)}", color=faint, va="center")
    axis.text(end, fixed[worst][-1], f"worst fixed: {named(worst)}", color=faint, va="center")
    axis.text(0.03, 0.985, "plain decoding", color=faint, va="top")
    axis.text(
        0.62 * (count - 1),
        0.89,
        "fixed choices of draft and length",
        color=theme["ink"],
        va="center",
        ha="center",
    )


def _frame(axis: Axes, loads: list[int], theme: dict[str, str]) -> None:
    axis.set_xticks(range(len(loads)), [f"{load} in flight" for load in loads])
    axis.set_xlim(-0.15, len(loads) - 1 + 0.95)
    axis.set_ylim(0.65, 1.5)
    axis.set_yticks([0.75, 1.0, 1.25, 1.5], ["0.75", "1", "1.25", "1.5"])
    axis.set_ylabel("tokens/s over plain decoding")
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=theme["ink"])
    axis.yaxis.label.set_color(theme["ink"])


def over_policies(record: dict[str, Any]) -> Over:
    """Return Spindle over the other policies, all loads of a sweep together."""
    own = {row["over"]: row for row in record["overall"]}
    return [
        (POLICIES.get(name, name), own[name]["ratio"], own[name]["interval_95"])
        for name in (BEST_FIXED, *ADAPTING)
    ]


def over_peers(record: dict[str, Any]) -> Over:
    """Return Spindle over the other servers, by the requests in flight."""
    rows = [row for family in record["families"] for row in family["rows"] if row["arm"] in STACKS]
    rows.sort(key=lambda row: (row["in_flight"], list(STACKS).index(row["arm"])))
    return [
        (
            f"{STACKS[row['arm']]}, {row['in_flight']} in flight",
            row["spindle_over"]["median"],
            row["spindle_over"]["interval_95"],
        )
        for row in rows
    ]


def comparison(rows: Over, theme: dict[str, str]) -> plt.Figure:
    """Draw a dot and its interval for each row, on a line of equal speed."""
    figure, axis = plt.subplots(figsize=(7.2, 0.5 + 0.36 * len(rows)), layout="constrained")
    axis.axvline(1, color=theme["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for place, (_, ratio, ends) in enumerate(rows):
        low, high = ends or (ratio, ratio)
        colour = theme["line"] if low > 1 or high < 1 else theme["faint"]
        axis.plot([low, high], [place, place], color=colour, linewidth=2.5, zorder=2)
        axis.plot(ratio, place, "o", color=colour, markersize=8, zorder=3)
        words = f"{ratio:.2f}"
        axis.annotate(
            words,
            (high, place),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            weight="bold",
        )
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.invert_yaxis()
    axis.margins(x=0.12, y=0.08)
    axis.set_xlabel("Spindle's speed over it, with 95 % interval")
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=theme["ink"])
    axis.xaxis.label.set_color(theme["ink"])
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
    found = ratios(records.read(RECORD))
    mpl.rcParams.update({"svg.hashsalt": "spindle", "font.size": 11})
    policies, peers = over_policies(records.read(RECORD)), over_peers(records.read(PEERS))
    for name, theme in THEMES.items():
        figures = {
            "speed": speed(found, theme),
            "policies": comparison(policies, theme),
            "peers": comparison(peers, theme),
        }
        for kind, figure in figures.items():
            path: Path = PICTURES / f"{kind}-{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)
        (PICTURES / f"how-it-works-{name}.svg").write_text(how_it_works(theme), "utf-8")


if __name__ == "__main__":
    main()
