"""The benchmark's figures: speeds of all arms, their summary, its table and its picture."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.pictures import THEMES
from bench.traces.arms import FIXED_EAGLE, NONE, PLANNER, Load, made_up_claims, tuned, untuned
from bench.traces.costs import Costs
from bench.traces.world import World
from policy.baselines import compared
from policy.plan import IntArray

MIXED = "mixed"
"""The name of all sets together."""
TOKENS = {1: 8_000, 8: 40_000}
"""Tokens of a run, by the requests in flight; with other numbers in flight, all there are."""


def order(world: World, half: IntArray, in_flight: int, tokens: int = 0) -> IntArray:
    """Return the requests of a run: the first of a half that have ``tokens`` (0: as ``TOKENS``
    says), as often as makes three for every slot.
    """
    most = tokens or TOKENS.get(in_flight, 10**9)
    chosen = half[: int(world.size[half].cumsum().searchsorted(most)) + 1]
    return np.tile(chosen, -(-3 * in_flight // len(chosen)))


def cell(
    world: World,
    costs: Costs,
    data: str,
    in_flight: int,
    *,
    arms: Iterable[str] = (),
    seed: int = 7,
    tokens: int = 0,
) -> dict[str, Any]:
    """Return the speeds of arms (none named: of all) on each half of some data, settings tuned on
    the other half.
    """
    halves = world.halves(() if data == MIXED else (data,), seed)
    loads = [
        Load(world, order(world, half, in_flight, tokens), in_flight, costs) for half in halves
    ]
    wanted, claims = set(arms), made_up_claims(world)
    rows: dict[str, Any] = {}
    for half, load in enumerate(loads):
        every = untuned(costs, claims) | tuned(loads[1 - half], claims, wanted)
        for name, arm in every.items():
            if not wanted or name in wanted | {NONE, FIXED_EAGLE}:
                ran = load.run(arm)
                row = rows.setdefault(name, {"tokens_per_s": [], "planning_s": [], "settings": []})
                row["tokens_per_s"].append(ran.speed)
                row["planning_s"].append(float(np.mean(ran.planning_s)))
                row["settings"].append(arm.settings)
    return {"data": data, "in_flight": in_flight, "arms": rows}


def summary(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each arm of each cell: means of both halves, and the halves."""
    rows = []
    for one in cells:
        speeds = {name: row["tokens_per_s"] for name, row in one["arms"].items()}
        for name, own in speeds.items():
            over = {
                key: [mine / theirs for mine, theirs in zip(own, speeds[other], strict=True)]
                for key, other in (("over_none", NONE), ("over_fixed_eagle", FIXED_EAGLE))
            }
            rows.append(
                {
                    "data": one["data"],
                    "in_flight": one["in_flight"],
                    "arm": name,
                    **{key: mean(values) for key, values in over.items()},
                    **{f"{key}_by_half": values for key, values in over.items()},
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table for each set of data: tokens per second over the best fixed length of EAGLE,
    that over none; a line an arm, a column a number of requests in flight, both halves.
    """
    blocks = []
    for data in dict.fromkeys(row["data"] for row in rows):
        found = {(r["arm"], r["in_flight"]): r for r in rows if r["data"] == data}
        loads = sorted({load for _, load in found})
        lines = [f"{data}, over {FIXED_EAGLE} (it: over none)"]
        lines.append(f"{'in flight':34}" + "".join(f"{load:>16}" for load in loads))
        for arm in dict.fromkeys(arm for arm, _ in found):
            cells = (_cell(arm, found.get((arm, load))) for load in loads)
            lines.append(f"{arm:34}" + "".join(f"{text:>16}" for text in cells))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(arm: str, row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if arm == FIXED_EAGLE:
        return " ".join(f"{value:.3f}" for value in row["over_none_by_half"])
    return " ".join(f"{100 * (value - 1):+.1f}%" for value in row["over_fixed_eagle_by_half"])


LEAST_SHOWN = -20.0
"""Percent; what is slower lies below the picture."""

Lines = dict[str, dict[int, float]]
"""Percent over the best fixed length of EAGLE by arm and requests in flight."""


def picture(rows: list[dict[str, Any]], theme: dict[str, str] = THEMES["light"]) -> Figure:
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
    found: Lines = {}
    shown = (PLANNER, "rule", "fixed-suffix", *compared())
    for row in rows:
        if row["data"] == data and row["arm"] in shown:
            percent = 100 * (row["over_fixed_eagle"] - 1)
            found.setdefault(row["arm"], {})[row["in_flight"]] = percent
    return found


def _panel(axis: Axes, lines: Lines, theme: dict[str, str], *, labels: bool) -> None:
    loads = sorted({load for line in lines.values() for load in line})
    axis.axhline(0, color=theme["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    least = min((value for line in lines.values() for value in line.values()), default=0)
    most = max((value for line in lines.values() for value in line.values()), default=0)
    low, high = max(least, LEAST_SHOWN) - 2, most + 2
    for arm, line in lines.items():
        colour, width = _style(arm, theme)
        places = [loads.index(load) for load in line]
        axis.plot(places, [*line.values()], color=colour, linewidth=width, zorder=1 + width)
        if arm == PLANNER or (arm == "rule" and not labels):
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
        words = arm if ends[arm] >= low else f"{arm} ↓ {ends[arm]:.0f} %"
        colour, width = _style(arm, theme)
        weight = "bold" if width > 2 else "normal"
        axis.text(loads - 1 + 0.08, at, words, color=colour, weight=weight, va="center", size=9)


def _style(arm: str, theme: dict[str, str]) -> tuple[str, float]:
    """Return colour and width of a line."""
    if arm == PLANNER:
        return theme["line"], 2.5
    return (theme["ink"], 1.5) if arm == "rule" else (theme["faint"], 0.8)


def save(figure: Figure, path: Any) -> None:
    """Write a picture as SVG, the same bytes for the same figures."""
    with mpl.rc_context({"svg.hashsalt": "spindle"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
