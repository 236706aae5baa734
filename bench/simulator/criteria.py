"""The design's criteria for the simulated comparisons, against what was found."""

from __future__ import annotations

from typing import Any

from bench.simulator.protocol import share_captured
from policy.simulation import report
from policy.simulation.experiments import BACKLOG, ArmComparison, pool

_UTILISATION = 0.8
_GAP = 1.1


def describe(comparison: ArmComparison, tuning: list[int], reporting: list[int]) -> dict[str, Any]:
    """Return a comparison as data, with how far the best fixed choice is from the oracle and how
    much of that adapting captures.
    """
    document = report.describe(comparison, tuning, reporting)
    results = comparison.results
    for point in document["points"]:
        load, fixed = point["load"], point["fixed"]
        if "oracle" in point["arms"]:
            cost, least = (pool(results, arm, load, reporting) for arm in (fixed, "oracle"))
            point["gap"] = report.figure(cost / least)
            share = share_captured(results, "adaptive", fixed, load, reporting)
            point["captured"] = report.figure(share)
    return document


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
    if point["gap"] >= _GAP and comparison["mix"] == "mix":
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
    outcome = f"better at {_loads(better)}, worse at {_loads(worse)}"
    return {
        "scenario": comparison["scenario"],
        "load": None,
        "what": f"against {arm}",
        "wanted": "better somewhere, worse nowhere",
        "found": outcome,
        "met": bool(better) and not worse,
    }


def _loads(loads: list[float]) -> str:
    return ", ".join("backlog" if load == BACKLOG else f"{load:g}" for load in loads) or "no load"


def _row(
    where: str, load: float, what: str, wanted: str, values: list[float], met: bool
) -> dict[str, Any]:
    text = f"{values[0]:.3f}" + (
        f" ({values[1]:.3f} to {values[2]:.3f})" if len(values) == 3 else ""
    )
    return {
        "scenario": where,
        "load": load,
        "what": what,
        "wanted": wanted,
        "found": text,
        "met": bool(met),
    }
