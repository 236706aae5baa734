"""Figures of the runs of a sweep: a row a policy and point, paired ratios with intervals, the
noise floor, and claims against bars.

A run is one policy over one block of a point (workload, load). All policies of a block serve the
same requests at the same times; a block counts where all of them have run. Block 0 is cold, the
others warm. ``none`` has two runs a block, its own and ``none-again``'s: at the ends of the block,
so that a machine that gets slower or faster within it favours no policy over their mean. ``speed``
of a run: emitted tokens per second in a closed loop, in an open one emitted tokens per second of
latency (from the scheduled arrival). A ratio is the geometric mean over blocks of ratios within a
block, its interval Student's. A claim holds where the whole interval clears its bar, is missed
where none of it does, else it is open.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bench.peers.arms import PEERS
from bench.sweep.arms import ADAPTING, AGAIN, NONE, SPINDLE, is_ablation
from policy.simulation.statistics import ratio_of_rates

Run = dict[str, Any]
Point = tuple[str, str]
BEST_FIXED = "best fixed choice"
EVERY = "every workload"
LOOPING_SHARE = 0.5
ALONE, SATURATED, OF_BEST_FIXED, OF_OTHERS = 1.5, 0.98, 0.97, 1.0
"""Bars: over no speculation with one in flight (the mix, or every workload) and at saturation; over
the best fixed choice and other policies anywhere.
"""


def is_closed(load: str) -> bool:
    """Say whether a load is a closed loop."""
    return load.startswith("closed-")


def level(load: str) -> float:
    """Return the requests in flight of a closed loop, the share of the capacity of an open one."""
    return float(load.rpartition("-")[2])


def speed(run: Run) -> float:
    """Return emitted tokens per second: of the run in a closed loop, of latency in an open one."""
    tokens = sum(reply["output_tokens"] for reply in run["replies"])
    return float(
        tokens
        / (
            run["wall_s"]
            if is_closed(run["load"])
            else sum(reply["total_s"] for reply in run["replies"])
        )
    )


def between(run: Run) -> float:
    """Return the tokens per second of a reply after its first token, in the mean of replies."""
    return float(1 / np.mean([reply["token_s"] for reply in run["replies"] if reply["token_s"]]))


def blocks(runs: Iterable[Run], policies: list[str]) -> dict[Point, dict[int, dict[str, Run]]]:
    """Return the runs by point, block and policy, of blocks that all policies have run."""
    by_point: dict[Point, dict[int, dict[str, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        by_point[run["workload"], run["load"]][run["block"]][run["policy"]] = run
    whole = {
        point: {n: block for n, block in sorted(by_block.items()) if not {*policies} - {*block}}
        for point, by_block in by_point.items()
    }
    return {point: by_block for point, by_block in whole.items() if by_block}


def summary(
    points: dict[Point, dict[int, dict[str, Run]]], policies: list[str]
) -> list[dict[str, Any]]:
    """Return a row a point and policy: of the warm blocks, or of the cold one where it is all there
    is (``warm_blocks`` 0).
    """
    return [
        {
            "workload": workload,
            "load": load,
            "policy": policy,
            **_row(_warm(by_block), by_block, policy),
        }
        for (workload, load), by_block in points.items()
        for policy in policies
        if policy != AGAIN
    ]


def compare(
    points: dict[Point, dict[int, dict[str, Run]]], policies: list[str]
) -> list[dict[str, Any]]:
    """Return ratios of speeds: every policy over none, and spindle over each other one and over the
    best fixed choice.

    With several workloads, the last rows are of ``EVERY`` one of them, load by load: a
    block of any of them is a pair.
    """
    speeds = block_speeds(points, policies)
    return [
        {"workload": workload, "load": load, "policy": policy, "over": over, **interval(*pair)}
        for (workload, load), by_policy in (speeds | _together(speeds)).items()
        for (policy, over), pair in _pairs(by_policy).items()
    ]


def overall(
    points: dict[Point, dict[int, dict[str, Run]]], policies: list[str]
) -> list[dict[str, Any]]:
    """Return the ratios of spindle to the other adapting policies and to the best fixed choice, of
    all points together: a warm block of any is a pair.
    """
    pairs: dict[str, tuple[list[float], list[float]]] = {
        over: ([], []) for over in (*ADAPTING, BEST_FIXED)
    }
    for by_policy in block_speeds(points, policies).values():
        for (_, over), pair in _pairs(by_policy).items():
            if over in pairs:  # only spindle is over others than none
                for every, speeds in zip(pairs[over], pair, strict=True):
                    every.extend(speeds)
    return [{"over": over, **interval(*pair)} for over, pair in pairs.items() if pair[0]]


def of_spindle(
    runs: Iterable[Run], measured: Callable[[Run], float] = speed
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Return by load and other policy, or ``BEST_FIXED``, the speeds of spindle and of the other in
    each warm block, of ``EVERY`` workload together.
    """
    every = list(runs)
    policies = list(dict.fromkeys(run["policy"] for run in every))
    speeds = block_speeds(blocks(every, policies), policies, measured)
    speeds = _together(speeds) or speeds
    return {
        (load, over): pair
        for (_, load), by_policy in speeds.items()
        for (policy, over), pair in _pairs(by_policy).items()
        if policy == SPINDLE
    }


def block_speeds(
    points: dict[Point, dict[int, dict[str, Run]]],
    policies: list[str],
    measured: Callable[[Run], float] = speed,
) -> dict[Point, dict[str, list[float]]]:
    """Return the speed of every policy in each warm block, by point."""
    return {
        point: {
            policy: [_speed(block, policy, measured) for block in _warm(by_block)]
            for policy in policies
        }
        for point, by_block in points.items()
    }


def _together(speeds: dict[Point, dict[str, list[float]]]) -> dict[Point, dict[str, list[float]]]:
    """Return the speeds of ``EVERY`` workload together, of the loads of several."""
    pooled = {}
    for load in dict.fromkeys(load for _, load in speeds):
        every = [by_policy for (_, at), by_policy in speeds.items() if at == load]
        if len(every) > 1:
            pooled[EVERY, load] = {
                policy: [value for by_policy in every for value in by_policy[policy]]
                for policy in every[0]
            }
    return pooled


def _pairs(
    speeds: dict[str, list[float]],
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    others = [policy for policy in speeds if policy not in (NONE, AGAIN)]
    pairs = {(policy, NONE): (speeds[policy], speeds[NONE]) for policy in others}
    pairs |= {
        (SPINDLE, policy): (speeds[SPINDLE], speeds[policy])
        for policy in others
        if policy != SPINDLE
    }
    if best := best_fixed(speeds):
        pairs[SPINDLE, BEST_FIXED] = speeds[SPINDLE], best
    return pairs


def best_fixed(speeds: dict[str, list[float]]) -> list[float]:
    """Return the speed in each block of the fixed choice that was best in the other blocks:
    hindsight, but on other prompts.
    """
    fixed = {
        policy: np.log(values) for policy, values in speeds.items() if policy.startswith("fixed-")
    }
    count = len(speeds[SPINDLE])
    if not fixed or count < 2:
        return []
    best_policies = [
        max(fixed, key=lambda policy: np.delete(fixed[policy], block).mean())
        for block in range(count)
    ]
    return [speeds[policy][block] for block, policy in enumerate(best_policies)]


def interval(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return the ratio with its 95 % interval; of one block there is none."""
    ratio = ratio_of_rates(ours, theirs)
    ends = (round(ratio.low, 4), round(ratio.high, 4)) if len(ours) > 1 else None
    return {"ratio": round(ratio.value, 4), "interval_95": ends, "blocks": len(ours)}


def noise(points: dict[Point, dict[int, dict[str, Run]]]) -> list[dict[str, Any]]:
    """Return the ratio of an arm to itself in each point, and of every workload together: what
    differs from 1 is noise.
    """
    speeds = {
        point: {name: [speed(block[name]) for block in _warm(by_block)] for name in (AGAIN, NONE)}
        for point, by_block in points.items()
        if all(AGAIN in block for block in by_block.values())
    }
    rows = (speeds | _together(speeds)).items()
    return [
        {"workload": workload, "load": load, **interval(by_arm[AGAIN], by_arm[NONE])}
        for (workload, load), by_arm in rows
    ]


def ablations(
    points: dict[Point, dict[int, dict[str, Run]]], policies: list[str]
) -> list[dict[str, Any]]:
    """Return for each part of spindle, or draft of its, the speed with it over that without it."""
    rows = []
    for (workload, load), by_block in points.items():
        for arm in filter(is_ablation, policies):
            kind, _, part = arm.partition("-")
            arm_speeds, whole = (
                [speed(block[policy]) for block in _warm(by_block)] for policy in (arm, SPINDLE)
            )
            pair = (arm_speeds, whole) if kind == "with" else (whole, arm_speeds)
            rows.append(
                {
                    "workload": workload,
                    "load": load,
                    "part": part,
                    "by_default": kind == "without",
                    **interval(*pair),
                }
            )
    return rows


def claims(ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is claimed of spindle, met or missed, point by point."""
    most = max((level(row["load"]) for row in ratios if is_closed(row["load"])), default=0.0)
    rows = []
    for row in ratios:
        if row["policy"] != SPINDLE or (bar := _bar(row, most)) is None:
            continue
        low, high = row["interval_95"] or (0.0, float("inf"))
        verdict = "holds" if low >= bar else "missed" if high < bar else "open"
        rows.append(
            {
                **{
                    key: row[key]
                    for key in ("workload", "load", "over", "ratio", "interval_95", "blocks")
                },
                "bar": bar,
                "verdict": verdict,
            }
        )
    return rows


def _bar(row: dict[str, Any], most: float) -> float | None:
    closed, at = is_closed(row["load"]), level(row["load"])
    if row["over"] == BEST_FIXED:
        return OF_BEST_FIXED
    if row["over"] in (*ADAPTING, *PEERS):
        return OF_OTHERS
    if row["over"] != NONE:
        return None
    if closed and at == 1:
        return ALONE if row["workload"] in ("mix", EVERY) else OF_OTHERS
    return SATURATED if (at == most if closed else at >= 1) else None


def _warm(by_block: dict[int, dict[str, Run]]) -> list[dict[str, Run]]:
    return [block for number, block in by_block.items() if number] or list(by_block.values())


def _runs(block: dict[str, Run], policy: str) -> list[Run]:
    """Return a policy's runs of a block."""
    return [
        block[name] for name in ((NONE, AGAIN) if policy == NONE else (policy,)) if name in block
    ]


def _speed(block: dict[str, Run], policy: str, measured: Callable[[Run], float]) -> float:
    """Return the geometric mean of a policy's runs of a block."""
    return float(np.exp(np.mean([np.log(measured(run)) for run in _runs(block, policy)])))


def _row(
    warm: list[dict[str, Run]], by_block: dict[int, dict[str, Run]], policy: str
) -> dict[str, Any]:
    pairs = [(run, block[NONE]) for block in warm for run in _runs(block, policy)]
    runs = [run for run, _ in pairs]
    replies, plain_replies = (
        [reply for pair in pairs for reply in pair[which]["replies"]] for which in (0, 1)
    )
    latency, first = ([reply[key] for reply in replies] for key in ("total_s", "first_s"))
    tokens, drafted, accepted = (
        sum(reply[key] for reply in replies) for key in ("output_tokens", "drafted", "accepted")
    )
    cold = [
        reply["total_s"] for run in _runs(by_block.get(0, {}), policy) for reply in run["replies"]
    ]
    counts: dict[str, float] = defaultdict(float)
    for run in runs:
        for name, value in run["counts"].items():
            counts[name] += value
    figures = {
        "mean_latency_s": np.mean(latency),
        "p50_latency_s": np.median(latency),
        "p99_latency_s": np.quantile(latency, 0.99),
        "latency_per_token_s": sum(latency) / tokens,
        "first_token_p50_s": np.median(first),
        "first_token_p99_s": np.quantile(first, 0.99),
        "inter_token_s": np.mean(
            [reply["token_s"] for reply in replies if reply["token_s"] is not None] or [0.0]
        ),
        "inter_response_p99_s": np.median([run["gap_p99_s"] for run in runs]),
        "tokens_per_s": tokens / sum(run["wall_s"] for run in runs),
        "looping_share": np.mean([reply["repeated_4grams"] > LOOPING_SHARE for reply in replies]),
        "wasted_draft_tokens_per_token": (drafted - accepted) / tokens,
        "same_text_as_none": np.mean(
            [
                ours["text"] == plain["text"]
                for ours, plain in zip(replies, plain_replies, strict=True)
            ]
        ),
        "sent_late_p99_s": np.quantile([reply["late_s"] for reply in replies], 0.99),
    }
    return {
        "warm_blocks": sum(number > 0 for number in by_block),
        "requests": len(replies),
        "output_tokens": tokens,
        **{name: round(float(value), 5) for name, value in figures.items()},
        "cold_mean_latency_s": round(float(np.mean(cold)), 5) if cold else None,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "step_time_share": _shares(counts),
        "predicted_over_measured_step_time": _predicted_share(counts),
        "tokens_by_draft": _by_label(counts, "spindle_emitted_tokens_total", "draft"),
        "draft_tokens_per_emitted_token": round(drafted / tokens, 4),
        "mean_batch": round(
            counts["spindle_batch_size_sum"] / max(1.0, counts["spindle_batch_size_count"]), 3
        ),
    }


def _predicted_share(counts: dict[str, float]) -> float | None:
    """Return the predicted over the measured time of the steps; None where not every step was
    predicted.
    """
    predicted, measured = (f"spindle_step{kind}_seconds" for kind in ("_predicted", ""))
    every = counts.get(f"{predicted}_count") == counts.get(f"{measured}_count", 0.0)
    return round(counts[f"{predicted}_sum"] / counts[f"{measured}_sum"], 4) if every else None


def _by_label(counts: dict[str, float], name: str, label: str) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for series, value in counts.items():
        if series.startswith(name) and (match := re.search(rf'\b{label}="([^"]*)"', series)):
            totals[match[1]] += value
    return dict(totals)


def _shares(counts: dict[str, float]) -> dict[str, float]:
    """Return what of the time of steps went into planning, learning, each draft, verification and
    the rest (taking in, committing, emitting).
    """
    parts = _by_label(counts, "spindle_step_part_seconds_total", "part")
    if "rest" in parts:
        parts["emit"] = parts.pop("rest")
    elif "overhead" in parts:  # records until November 2026: it had planning and learning in it
        parts["emit"] = (
            parts.pop("overhead") - parts.get("planning", 0.0) - parts.get("learning", 0.0)
        )
    else:
        return {}
    whole = sum(parts.values())
    return {part: round(seconds / whole, 5) for part, seconds in parts.items()}
