"""The figures of a sweep's report. Each returns None (or nothing at all) where the record has
nothing for it.

Sizes are those of print: text of 9 points at the least on a page as wide as a figure; series differ
by marker, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from backend.config import PolicyConfig
from bench.peers.arms import PEERS
from bench.sweep.arms import ADAPTING, NONE, SPINDLE, UNTOLD, fixed_choice, is_ablation
from bench.sweep.figures import is_closed, level
from policy.baselines import BASELINES, compared

_STYLES = {
    NONE: (BASELINES[NONE].colour, BASELINES[NONE].marker),
    **{name: (its.colour, its.marker) for name, its in compared().items()},
    UNTOLD: ("#7fb0dd", "d"),
    SPINDLE: ("#c8321e", "o"),
}
COLOURS = {name: colour for name, (colour, _) in _STYLES.items()}
MARKERS = {name: marker for name, (_, marker) in _STYLES.items()}
PARTS = {"planning": "#c8321e", "learning": "#e58a7c", "verify": "#2f6fb2", "emit": "#b9b9b9"}
DRAFT_COLOURS = ("#e0a030", "#2a8a57", "#8a4fb0", "#6f5a3a")
DRAFT_MARKERS = ("^", "D", "P", "v")
GREY = "#b9b9b9"
_MOST_PANELS = 6
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
    elif policy in PEERS or PolicyConfig(policy).own:
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


def heat_maps(record: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield for each workload its speed over no speculation: a panel for each draft, lengths by
    loads, and one of the policies.
    """
    for workload in workloads(record):
        rows = {
            (r["policy"], r["load"]): r["ratio"]
            for r in record["ratios"]
            if r["workload"] == workload and r["over"] == NONE
        }
        fixed = [
            policy
            for policy in dict.fromkeys(policy for policy, _ in rows)
            if policy.startswith("fixed-")
        ]
        panels = {
            draft: [n for n in fixed if fixed_choice(n)[0] == draft]
            for draft in dict.fromkeys(fixed_choice(n)[0] for n in fixed)
        }
        panels["policies"] = [
            policy for policy in (*ADAPTING, SPINDLE) if (policy, next(iter(rows))[1]) in rows
        ]
        yield workload, _heat_map(rows, {title: names for title, names in panels.items() if names})


def _heat_map(rows: dict[tuple[str, str], float], panels: dict[str, list[str]]) -> Figure:
    loads = list(dict.fromkeys(load for _, load in rows))
    spread = max(0.05, *(abs(value - 1) for value in rows.values()))
    heights = [len(names) for names in panels.values()]
    size = (2.0 + 0.8 * len(loads), 1.0 + 0.42 * len(panels) + 0.28 * sum(heights))
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=size,
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
        sharex=True,
    )
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        values = np.array([[rows[name, load] for load in loads] for name in names])
        axis.imshow(
            values, cmap="RdBu", norm=TwoSlopeNorm(1, 1 - spread, 1 + spread), aspect="auto"
        )
        labels = [
            f"k = {fixed_choice(name)[1]}" if name.startswith("fixed-") else name for name in names
        ]
        axis.set_yticks(range(len(names)), labels, fontsize=9)
        for (row, column), value in np.ndenumerate(values):
            pale = abs(value - 1) < 0.6 * spread
            axis.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=9,
                color="black" if pale else "white",
            )
        axis.tick_params(length=0)
        axis.set_title(title, fontsize=10, loc="left")
    axes.flat[-1].set_xticks(range(len(loads)), loads, rotation=30, ha="right", fontsize=9)
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
    left = np.zeros(len(wanted))
    for part in parts:
        shares = np.array([row[key].get(part, 0.0) / sum(row[key].values()) for row in wanted])
        axis.barh(
            range(len(wanted)),
            shares,
            left=left,
            color=colours[part],
            label=part,
            height=0.75,
            edgecolor="white",
            linewidth=0.5,
        )
        left += shares
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
    """Draw of which draft's steps the tokens are that Spindle emitted."""
    rows = [row for row in record["summary"] if row["policy"] == SPINDLE]
    return _bars(
        record,
        rows,
        lambda row: f"{row['workload']} {row['load']}",
        "tokens_by_draft",
        {"none": GREY},
    )


def over_time_figure(record: dict[str, Any]) -> Figure | None:
    """Draw what Spindle chose for each request, at the time that it ended: mean length, and the
    draft that proposed most.

    A panel a load of the last workload, its warm blocks one after the other.
    """
    names = workloads(record)
    loads = [load for workload, load in points(record) if names and workload == names[-1]]
    runs = {load: _warm_runs(record, names[-1], load) for load in loads}
    shown = _spread([load for load in loads if runs[load]], _MOST_PANELS)
    if not shown:
        return None
    figure, axes = _panels(len(shown), height=2.7)
    styles = {"none": (GREY, "x")} | {
        d: (DRAFT_COLOURS[i % 4], DRAFT_MARKERS[i % 4]) for i, d in enumerate(_drafts(record))
    }
    for load, axis in zip(shown, axes, strict=False):
        begin_s, ended = 0.0, []
        for run in runs[load]:
            ended += [
                (begin_s + reply["due_s"] + reply["total_s"], *_chosen(reply))
                for reply in run["replies"]
            ]
            begin_s += run["wall_s"]
            axis.axvline(begin_s, color="#e6e6e6", linewidth=1)
        for draft, (colour, marker) in styles.items():
            at = [(end_s, length) for end_s, main, length in ended if main == draft]
            axis.plot(
                *(zip(*at, strict=True) if at else ([], [])),
                marker,
                color=colour,
                markersize=5,
                label=draft,
            )
        axis.set(title=f"{names[-1]}, {load}", xlabel="s", ylabel="tokens proposed a step")
        axis.set_ylim(0, 1 + max((length for _, _, length in ended), default=0.0))
    _legend(figure, axes)
    return figure


def _warm_runs(record: dict[str, Any], workload: str, load: str) -> list[Row]:
    found = [
        run
        for run in record["runs"]
        if (run["workload"], run["load"], run["policy"]) == (workload, load, SPINDLE)
    ]
    warm = sorted((run for run in found if run["block"]), key=lambda run: run["block"]) or found
    return warm if all("due_s" in reply for run in warm for reply in run["replies"]) else []


def _chosen(reply: Row) -> tuple[str, float]:
    """Return the draft that proposed most for a request, and the mean length over its steps."""
    proposed = {draft: counts[0] for draft, counts in reply["drafts"].items()}
    steps = max(1, reply["output_tokens"] - 1 - reply["accepted"])
    return max(proposed, key=lambda draft: proposed[draft], default="none"), sum(
        proposed.values()
    ) / steps


def _spread(items: list[str], most: int) -> list[str]:
    """Return so many of a list at the most, from its beginning to its end."""
    return [
        items[i]
        for i in dict.fromkeys(
            np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int).tolist()
        )
    ]


def positions_figure(record: dict[str, Any]) -> Figure | None:
    """Draw acceptance by position, each workload at its first load."""
    names = workloads(record)
    if not names:
        return None
    figure, axes = _panels(len(names), height=2.8)
    for workload, axis in zip(names, axes, strict=False):
        load = next(load for name, load in points(record) if name == workload)
        for row in record["summary"]:
            if (row["workload"], row["load"]) == (workload, load) and row["acceptance_by_position"]:
                places = row["acceptance_by_position"]
                _line(axis, row["policy"], [int(place) for place in places], list(places.values()))
        axis.set(title=f"{workload}, {load}", xlabel="position", ylabel="accepted", ylim=(0, 1))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def ablations_figure(rows: list[Row]) -> Figure | None:
    """Draw the speed with each part over that without it, and the 95 % interval, by load."""
    if not rows:
        return None
    parts = list(dict.fromkeys((row["part"], row["by_default"]) for row in rows))
    places = list(dict.fromkeys((row["workload"], row["load"]) for row in rows))
    figure, axis = plt.subplots(
        figsize=(7.5, 1.0 + (0.18 * len(places) + 0.18) * len(parts)), layout="constrained"
    )
    for number, place in enumerate(places):
        own = {row["part"]: row for row in rows if (row["workload"], row["load"]) == place}
        shift = (number - (len(places) - 1) / 2) * 0.7 / len(places)
        for y, (part, _) in enumerate(parts):
            if ends := own[part]["interval_95"]:
                axis.plot(
                    ends, [y + shift] * 2, color=DRAFT_COLOURS[number % 4], linewidth=1.6, zorder=2
                )
        ratios, heights = (
            [own[part]["ratio"] for part, _ in parts],
            [y + shift for y in range(len(parts))],
        )
        marker = ("o", *DRAFT_MARKERS)[number % 5]
        axis.plot(
            ratios,
            heights,
            marker,
            color=DRAFT_COLOURS[number % 4],
            markersize=6,
            label=", ".join(place),
            zorder=3,
        )
    axis.axvline(1, color=COLOURS[NONE], linewidth=1)
    axis.set_yticks(
        range(len(parts)),
        [f"{part}{'' if default else ' (off by default)'}" for part, default in parts],
        fontsize=9,
    )
    axis.invert_yaxis()
    middle = [row["ratio"] for row in rows]
    axis.set_xlim(min(0.8, 0.95 * min(middle)), max(1.2, 1.05 * max(middle)))
    axis.set_xlabel("speed with the part over speed without it")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def simulation_figure(record: dict[str, Any]) -> Figure | None:
    """Draw predicted against measured mean latency, a marker a policy and point; open where it is
    saturated.
    """
    if not (rows := record.get("simulation")):
        return None
    figure, axis = plt.subplots(figsize=(6.2, 4.6), layout="constrained")
    kinds = {
        "fixed choices": (GREY, "."),
        **_STYLES,
    }
    for kind, (colour, marker) in kinds.items():
        own = [
            row
            for row in rows
            if row["policy"] == kind
            or (kind == "fixed choices" and row["policy"].startswith("fixed-"))
        ]
        for below in (True, False):
            x, y = (
                [row[f"{what}_s"] for row in own if row["below_saturation"] is below]
                for what in ("measured", "predicted")
            )
            face = colour if below else "none"
            axis.plot(
                x,
                y,
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=6,
                label=kind if below else "",
                zorder=3,
            )
    _agreement(axis, [row[key] for row in rows for key in ("measured_s", "predicted_s")], 0.1)
    axis.set(xlabel="measured mean latency, s", ylabel="simulated mean latency, s")
    axis.legend(fontsize=9, frameon=False)
    return figure


def step_time_figure(record: dict[str, Any]) -> Figure | None:
    """Draw the planner's predicted against measured time of a step, the mean of each warm run of
    Spindle's; a marker a load.
    """
    points_of = {}
    for load in dict.fromkeys(load for _, load in points(record)):
        runs = [
            run
            for run in record["runs"]
            if run["load"] == load and run["policy"] == SPINDLE and run["block"]
        ]
        if times := [pair for run in runs if (pair := _step_ms(run["counts"]))]:
            points_of[load] = times
    if not points_of:
        return None
    figure, axis = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
    markers = ("o", *DRAFT_MARKERS)
    for number, (load, times) in enumerate(points_of.items()):
        colour, marker = list(COLOURS.values())[number % 6], markers[number % 5]
        axis.plot(
            *zip(*times, strict=True), marker, color=colour, markersize=5, label=load, zorder=3
        )
    _agreement(
        axis, [value for times in points_of.values() for pair in times for value in pair], 0.1
    )
    axis.set(xlabel="measured mean step, ms", ylabel="predicted mean step, ms")
    axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _step_ms(counts: dict[str, float]) -> tuple[float, float] | None:
    """Return a run's mean measured and predicted step; None where not every step was predicted."""
    steps, predicted = (
        counts.get(f"spindle_step{kind}_seconds_count", 0.0) for kind in ("", "_predicted")
    )
    if not steps or steps != predicted:
        return None
    return 1e3 * counts["spindle_step_seconds_sum"] / steps, 1e3 * counts[
        "spindle_step_predicted_seconds_sum"
    ] / steps


def _agreement(axis: Axes, values: list[float], share: float) -> None:
    """Draw the line on which both are equal, and the band around it; both scales logarithmic where
    they span much.
    """
    ends = np.array([0.9 * min(values), 1.1 * max(values)])
    axis.plot(ends, ends, color=COLOURS[NONE], linewidth=1, zorder=1)
    axis.fill_between(ends, ends * (1 - share), ends * (1 + share), color="#e9e9e9", zorder=0)
    if ends[1] > 4 * ends[0]:
        axis.set(xscale="log", yscale="log")
        for own in (axis.xaxis, axis.yaxis):
            own.set_major_formatter(lambda value, _: f"{value:g}")
            own.set_minor_formatter(
                lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
            )
    axis.spines[["top", "right"]].set_visible(False)
