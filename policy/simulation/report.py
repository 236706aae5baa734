"""A comparison as a document that can be kept, with paired intervals, and as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from .experiments import BACKLOG, ArmComparison, arm_ratio
from .statistics import Ratio


def describe(comparison: ArmComparison, tuning: list[int], reporting: list[int]) -> dict[str, Any]:
    """Return a comparison as JSON-able data. Latency ratios below 1 and throughput ratios above 1
    speak for ``adaptive``.
    """
    scenario = comparison.scenario
    return {
        "scenario": scenario.name,
        "deployment": scenario.deployment.name,
        "provenance": scenario.deployment.provenance,
        "mix": scenario.mix.name,
        "variation": scenario.variation,
        "requests": scenario.requests,
        "rate_hz": scenario.rate_hz,
        "planning_us": [(rows, round(1e6 * s, 1)) for rows, s in scenario.deployment.planning_s],
        "table_error": scenario.table_error,
        "tuning_seeds": tuning,
        "reporting_seeds": reporting,
        "tuned": comparison.tuned,
        "points": [_point(comparison, load, reporting) for load in comparison.arms],
    }


def _point(comparison: ArmComparison, load: float, seeds: list[int]) -> dict[str, Any]:
    results = comparison.results
    point: dict[str, Any] = {"load": load, "fixed": comparison.fixed[load], "arms": {}}
    for arm in comparison.arms[load]:
        runs = [
            r
            for task, r in results.items()
            if task.arm == arm and task.load == load and task.seed in seeds
        ]
        latency_s = np.concatenate([run.latency_s for run in runs])
        point["arms"][arm] = {
            "latency_s": figure(latency_s.mean()),
            "latency_p95_s": figure(np.quantile(latency_s, 0.95)),
            "first_token_s": figure(np.concatenate([run.first_token_s for run in runs]).mean()),
            "tokens_per_s": figure(np.mean([run.tokens_per_s for run in runs])),
            "rows": figure(np.mean([run.rows for run in runs])),
            "length": figure(
                np.sum([run.proposed for run in runs])
                / max(np.sum([run.rows for run in runs]), 1e-9)
            ),
            "adaptive_over_it": _interval(arm_ratio(results, "adaptive", arm, load, seeds)),
        }
    return point


def _interval(ratio: Ratio) -> list[float]:
    return [figure(ratio.value), figure(ratio.low), figure(ratio.high)]


def figure(value: float | np.floating[Any]) -> float:
    """Return a number with four figures."""
    return float(f"{float(value):.4g}")


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
