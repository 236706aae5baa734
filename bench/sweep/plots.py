"""The figures of a sweep's report. Each returns None where the record has nothing for it.

Sizes are those of print: text of 9 points at the least on a page as wide as a figure; series differ
by marker, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backend.config import PolicyConfig
from bench.baselines import BASELINES, compared_baselines
from bench.peers.arms import PEERS
from bench.sweep.arms import ADAPTING, NONE, SPINDLE, UNTOLD, is_ablation
from bench.sweep.figures import is_closed, level

_STYLES = {
    NONE: (BASELINES[NONE].colour, BASELINES[NONE].marker),
    **{name: (its.colour, its.marker) for name, its in compared_baselines().items()},
    UNTOLD: ("#7fb0dd", "d"),
    SPINDLE: ("#c8321e", "o"),
}
COLOURS = {name: colour for name, (colour, _) in _STYLES.items()}
MARKERS = {name: marker for name, (_, marker) in _STYLES.items()}
PARTS = {"planning": "#c8321e", "learning": "#e58a7c", "verify": "#2f6fb2", "emit": "#b9b9b9"}
DRAFT_COLOURS = ("#e0a030", "#2a8a57", "#8a4fb0", "#6f5a3a")
GREY = "#b9b9b9"
Row = dict[str, Any]


def points(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the points (workload, load) in order."""
    return list(dict.fromkeys((row["workload"], row["load"]) for row in record["summary"]))


def policies(record: dict[str, Any]) -> list[str]:
    """Return the policies in order, ablations left out."""
    return [
        policy
        for policy in dict.fromkeys(row["policy"] for row in record["summary"])
        if not is_ablation(policy)
    ]


def workloads(
    record: dict[str, Any], wanted: Callable[[str], bool] = lambda load: True
) -> list[str]:
    """Return the workloads that have a load of a kind."""
    return list(dict.fromkeys(workload for workload, load in points(record) if wanted(load)))


def _panels(count: int, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(5.2, 3.9 * columns), height * rows),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6")
    return figure, list(axes.flat)


def _legend(figure: Figure, axes: list[Axes]) -> None:
    """Tell below all panels what the first one's series are."""
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4 if len(axes) == 1 else 7,
        fontsize=9,
        frameon=False,
    )


def _line(axis: Axes, policy: str, x: list[float], y: list[float]) -> None:
    if policy in COLOURS:
        width = 2.2 if policy == SPINDLE else 1.4
        axis.plot(
            x,
            y,
            marker=MARKERS[policy],
            markersize=6,
            color=COLOURS[policy],
            linewidth=width,
            label=policy,
            zorder=3,
        )
    elif policy in PEERS or PolicyConfig(policy).is_custom:
        colour = DRAFT_COLOURS[([*PEERS].index(policy) if policy in PEERS else len(policy)) % 4]
        axis.plot(
            x, y, marker="x", linestyle=":", color=colour, linewidth=1.2, label=policy, zorder=2
        )
    else:
        axis.plot(x, y, marker=".", color="#cfcfcf", linewidth=0.9, zorder=1)


def latency_figure(record: dict[str, Any]) -> Figure | None:
    """Draw mean latency against the rate of requests, a panel for each workload and kind of
    arrivals; None without open loops.
    """
    panels = list(
        dict.fromkeys(
            (row["workload"], row["load"].rpartition("-")[0])
            for row in record["summary"]
            if not is_closed(row["load"])
        )
    )
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for (workload, kind), axis in zip(panels, axes, strict=False):
        for policy in policies(record):
            rows = [
                r
                for r in record["summary"]
                if (r["workload"], r["policy"]) == (workload, policy)
                and r["load"].startswith(f"{kind}-")
            ]
            _line(
                axis,
                policy,
                [level(row["load"]) for row in rows],
                [row["mean_latency_s"] for row in rows],
            )
        axis.set(
            title=f"{workload}, {kind}",
            xlabel="rate, share of capacity",
            ylabel="mean latency, s",
            ylim=(0, None),
        )
    _legend(figure, axes)
    return figure


def throughput_figure(record: dict[str, Any]) -> Figure | None:
    """Draw tokens per second over no speculation against requests in flight, a panel for each
    workload; None without closed loops.
    """
    names = workloads(record, is_closed)
    if not names:
        return None
    figure, axes = _panels(len(names))
    for workload, axis in zip(names, axes, strict=False):
        for policy in policies(record):
            rows = [
                r
                for r in record["ratios"]
                if (r["workload"], r["policy"], r["over"]) == (workload, policy, NONE)
                and is_closed(r["load"])
            ]
            x = [level(row["load"]) for row in rows]
            _line(axis, policy, x, [row["ratio"] for row in rows])
            if policy == SPINDLE:
                for at, row in zip(x, rows, strict=True):
                    if row["interval_95"] and row["interval_95"][1] < 3 * row["ratio"]:
                        axis.plot(
                            [at, at],
                            row["interval_95"],
                            color=COLOURS[SPINDLE],
                            linewidth=1,
                            zorder=2,
                        )
        axis.axhline(1, color=COLOURS[NONE], linewidth=1)
        axis.set(title=workload, xlabel="requests in flight", ylabel="over no speculation")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend(figure, axes)
    return figure


def _bars(
    record: dict[str, Any],
    wanted: list[Row],
    label: Callable[[Row], str],
    key: str,
    colours: dict[str, str],
) -> Figure | None:
    """Draw a stacked bar a row, of the shares under ``key``."""
    wanted = [row for row in wanted if row[key]]
    if not wanted:
        return None
    parts = list(dict.fromkeys(part for row in wanted for part in row[key]))
    colours = colours | {
        f"{kind}{name}": DRAFT_COLOURS[i % 4]
        for i, name in enumerate(_drafts(record))
        for kind in ("", "draft:")
    }
    figure, axis = plt.subplots(figsize=(8.5, 0.8 + 0.26 * len(wanted)), layout="constrained")
    offsets = np.zeros(len(wanted))
    for part in parts:
        shares = np.array([row[key].get(part, 0.0) / sum(row[key].values()) for row in wanted])
        axis.barh(
            range(len(wanted)),
            shares,
            left=offsets,
            color=colours[part],
            label=part,
            height=0.75,
            edgecolor="white",
            linewidth=0.5,
        )
        offsets += shares
    axis.set_yticks(range(len(wanted)), [label(row) for row in wanted], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _drafts(record: dict[str, Any]) -> list[str]:
    return [draft["name"] for draft in record["settings"]["config"]["drafts"]]


def _last_workload(record: dict[str, Any]) -> Iterable[Row]:
    names = workloads(record)
    return (row for row in record["summary"] if row["workload"] == names[-1]) if names else ()


def time_shares_figure(record: dict[str, Any]) -> Figure | None:
    """Draw what of a step's time each part takes."""
    rows = [
        row
        for row in _last_workload(record)
        if row["policy"] in (NONE, *ADAPTING, SPINDLE) and is_closed(row["load"])
    ]
    return _bars(
        record,
        rows,
        lambda row: f"{row['workload']} {row['load']}, {row['policy']}",
        "step_time_share",
        PARTS,
    )


def choices_figure(record: dict[str, Any]) -> Figure | None:
    """Draw the share of Spindle's tokens by the draft of their step."""
    rows = [row for row in record["summary"] if row["policy"] == SPINDLE]
    return _bars(
        record,
        rows,
        lambda row: f"{row['workload']} {row['load']}",
        "tokens_by_draft",
        {"none": GREY},
    )
