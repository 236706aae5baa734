"""The picture of the benchmark over traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.baselines import BASELINES, compared_baselines
from bench.traces.arms import PLANNER

LEAST_SHOWN = -10.0
"""Percent; what is slower lies below the picture."""

Lines = dict[str, dict[int, float]]
"""Percent over the best fixed length of EAGLE by arm and requests in flight."""


def picture(rows: list[dict[str, Any]], theme: dict[str, str]) -> Figure:
    """Draw the planner, the rule and the policies of others over the best fixed length of EAGLE:
    all sets together above, each set below.
    """
    sets = list(dict.fromkeys(row["data"] for row in rows))
    wide, small = sets[0], sets[1:]
    mosaic = [[wide] * max(len(small), 1), *([small] if small else [])]
    size = 7.2, 3.6 + 2.2 * bool(small)
    figure = plt.figure(figsize=size, layout="constrained")
    axes = figure.subplot_mosaic(mosaic, height_ratios=[3, 2][: len(mosaic)])
    for data, axis in axes.items():
        _panel(axis, _lines(rows, data), theme, labels=data == wide)
        axis.set_title(data, color=theme["ink"], fontsize="medium")
    axes[wide].set_ylabel("tokens/s over the best fixed EAGLE, %", color=theme["ink"])
    figure.supxlabel("requests in flight", color=theme["ink"], fontsize="medium")
    return figure


def _lines(rows: list[dict[str, Any]], data: str) -> Lines:
    lines: Lines = {}
    arms = (PLANNER, "rule", "fixed-suffix", *compared_baselines())
    for row in rows:
        if row["data"] == data and row["arm"] in arms:
            percent = 100 * (row["over_fixed_eagle"] - 1)
            lines.setdefault(row["arm"], {})[row["in_flight"]] = percent
    return lines


def _panel(axis: Axes, lines: Lines, theme: dict[str, str], *, labels: bool) -> None:
    loads = sorted({load for line in lines.values() for load in line})
    ends = [0, len(loads) - 1]
    axis.plot(ends, [0, 0], color=theme["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    least = min((value for line in lines.values() for value in line.values()), default=0)
    most = max((value for line in lines.values() for value in line.values()), default=0)
    low, high = max(least, LEAST_SHOWN) - 2, most + 2
    for arm, line in lines.items():
        colour, width = _style(arm, theme)
        places = [loads.index(load) for load in line]
        axis.plot(places, [*line.values()], color=colour, linewidth=width, zorder=1 + width)
        if arm in (PLANNER, "rule"):
            axis.plot(places, [*line.values()], "o", color=colour, markersize=4, zorder=4)
    axis.set_ylim(low, high)
    axis.set_xlim(-0.15, len(loads) - 1 + (1.5 if labels else 0.15))
    axis.set_xticks(range(len(loads)), [str(load) for load in loads])
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=theme["ink"])
    if labels:
        _names(axis, {arm: line[max(line)] for arm, line in lines.items()}, len(loads), theme)


def _names(axis: Axes, ends: dict[str, float], loads: int, theme: dict[str, str]) -> None:
    """Name each line at its end, none on another; below the picture with an arrow."""
    low, high = axis.get_ylim()
    below = low - 0.05 * (high - low)
    for arm in sorted(ends, key=ends.__getitem__):
        at = below = max(ends[arm], below + 0.055 * (high - low))
        words = BASELINES[arm].label if arm in BASELINES else arm
        words += f" ↓ {ends[arm]:.0f} %" if ends[arm] < low else ""
        colour, width = _style(arm, theme)
        weight = "bold" if width > 2 else "normal"
        axis.text(loads - 1 + 0.08, at, words, color=colour, weight=weight, va="center", size=9)


def _style(arm: str, theme: dict[str, str]) -> tuple[str, float]:
    """Return colour and width of a line."""
    if arm == PLANNER:
        return theme["line"], 2.5
    return (theme["ink"], 1.5) if arm == "rule" else (theme["faint"], 0.8)


def save(figure: Figure, path: Path) -> None:
    """Write a picture as SVG, the same bytes for the same figures."""
    with mpl.rc_context({"svg.hashsalt": "spindle"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
