"""From results to a document that can be kept: tables with paired intervals, and what was wanted
against what was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .experiments import BACKLOG, Comparison, captured, compared, pooled
from .statistics import Ratio

_UTILISATION = 0.8
_GAP = 1.1


def described(comparison: Comparison, tuning: list[int], reporting: list[int]) -> dict[str, Any]:
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


def _point(comparison: Comparison, load: float, seeds: list[int]) -> dict[str, Any]:
    results, fixed = comparison.results, comparison.fixed[load]
    point: dict[str, Any] = {"load": load, "fixed": fixed, "arms": {}}
    for arm in comparison.arms[load]:
        runs = [
            r
            for task, r in results.items()
            if task.arm == arm and task.load == load and task.seed in seeds
        ]
        latency_s = np.concatenate([run.latency_s for run in runs])
        point["arms"][arm] = {
            "latency_s": _figure(latency_s.mean()),
            "latency_p95_s": _figure(np.quantile(latency_s, 0.95)),
            "first_token_s": _figure(np.concatenate([run.first_token_s for run in runs]).mean()),
            "tokens_per_s": _figure(np.mean([run.tokens_per_s for run in runs])),
            "rows": _figure(np.mean([run.rows for run in runs])),
            "length": _figure(
                np.sum([run.proposed for run in runs])
                / max(np.sum([run.rows for run in runs]), 1e-9)
            ),
            "adaptive_over_it": _interval(compared(results, "adaptive", arm, load, seeds)),
        }
    if "oracle" in comparison.arms[load]:
        point["gap"] = _figure(
            pooled(results, fixed, load, seeds) / pooled(results, "oracle", load, seeds)
        )
        point["captured"] = _figure(captured(results, "adaptive", fixed, load, seeds))
    return point


def criteria(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the design asks of the comparisons, point by point: what was wanted, what was
    found, whether it is met.
    """
    rows: list[dict[str, Any]] = []
    for comparison in comparisons:
        for point in comparison["points"]:
            rows += _criteria_at(comparison, point)
        rows += [_against(comparison, kind) for kind in ("smartspec", "schedule")]
    return rows


def _criteria_at(comparison: dict[str, Any], point: dict[str, Any]) -> list[dict[str, Any]]:
    where, load, fixed = comparison["scenario"], point["load"], point["fixed"]
    over_fixed = point["arms"][fixed]["adaptive_over_it"]
    over_none = point["arms"]["none"]["adaptive_over_it"]
    rows = []
    if load == BACKLOG:
        rows.append(
            _row(
                where, load, f"capacity over {fixed}", ">= 0.98", over_fixed, over_fixed[0] >= 0.98
            )
        )
    elif load <= _UTILISATION:
        rows.append(
            _row(where, load, f"latency over {fixed}", "<= 1.03", over_fixed, over_fixed[0] <= 1.03)
        )
        rows.append(
            _row(where, load, "latency over none", "<= 1.02", over_none, over_none[0] <= 1.02)
        )
    if point["gap"] >= _GAP and comparison["mix"] in {"mix", "mix-tagged"}:
        what = f"share captured of the gap {point['gap']:.2f} from {fixed} to the oracle"
        rows.append(
            _row(where, load, what, ">= 0.80", [point["captured"]], point["captured"] >= 0.8)
        )
    return rows


def _against(comparison: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return whether adaptive is somewhere better than a baseline and nowhere worse, by intervals
    that exclude 1.
    """
    arm, better, worse = comparison["tuned"][kind], [], []
    for point in comparison["points"]:
        _, low, high = point["arms"][arm]["adaptive_over_it"]
        if point["load"] == BACKLOG:
            low, high = 1 / high, 1 / low
        if high < 1:
            better.append(point["load"])
        if low > 1:
            worse.append(point["load"])
    found = f"better at {_loads(better)}, worse at {_loads(worse)}"
    return {
        "scenario": comparison["scenario"],
        "load": None,
        "what": f"against {arm}",
        "wanted": "better somewhere, worse nowhere",
        "found": found,
        "met": bool(better) and not worse,
    }


def _loads(loads: list[float]) -> str:
    return ", ".join("backlog" if load == BACKLOG else f"{load:g}" for load in loads) or "none"


def _row(
    where: str, load: float, what: str, wanted: str, found: list[float], met: bool
) -> dict[str, Any]:
    text = f"{found[0]:.3f}" + (f" ({found[1]:.3f} to {found[2]:.3f})" if len(found) == 3 else "")
    return {
        "scenario": where,
        "load": load,
        "what": what,
        "wanted": wanted,
        "found": text,
        "met": bool(met),
    }


def _interval(ratio: Ratio) -> list[float]:
    return [_figure(ratio.value), _figure(ratio.low), _figure(ratio.high)]


def _figure(value: float | np.floating[Any]) -> float:
    return float(f"{float(value):.4g}")
