"""The benchmark's figures: speeds of all arms, their summary and its table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bench.traces import scores
from bench.traces.arms import (
    FIXED_EAGLE,
    NONE,
    PLANNER,
    TraceLoad,
    by_path,
    made_up_claims,
    tune,
    untuned_arms,
)
from bench.traces.costs import Costs
from bench.traces.world import World
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
    shuffled = half[: int(world.size[half].cumsum().searchsorted(most)) + 1]
    return np.tile(shuffled, -(-3 * in_flight // len(shuffled)))


def cell(
    world: World,
    costs: Costs,
    data: str,
    in_flight: int,
    *,
    arms: Iterable[str] = (),
    seed: int = 7,
    tokens: int = 0,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Return the speeds of arms (none named: of all) on each half of some data, settings tuned on
    the other half. Scores of arms that do not change with the planner are kept in ``cache``.
    """
    halves = world.halves(() if data == MIXED else (data,), seed)
    orders = [order(world, half, in_flight, tokens) for half in halves]
    paths = [cache and scores.file(cache, world, one, in_flight, costs) for one in orders]
    loads = [
        TraceLoad(world, one, in_flight, costs, scores.read(path) if path else {})
        for one, path in zip(orders, paths, strict=True)
    ]
    wanted, claims = set(arms), made_up_claims(world)
    rows: dict[str, Any] = {}
    for half, load in enumerate(loads):
        every = untuned_arms(costs, claims) | tune(loads[1 - half], claims, wanted)
        every |= {name: by_path(costs, name) for name in wanted.difference(every)}
        for name, arm in every.items():
            if not wanted or name in wanted | {NONE, FIXED_EAGLE}:
                score = load.score(arm)
                row = rows.setdefault(name, {"tokens_per_s": [], "planning_s": [], "settings": []})
                row["tokens_per_s"].append(round(score.speed, 3))
                row["planning_s"].append(round(score.planning_s, 7))
                row["settings"].append(arm.settings)
    for path, load in zip(paths, loads, strict=True):
        if path:
            scores.write(path, load.scores)
    return {"data": data, "in_flight": in_flight, "arms": rows}


def summary(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each arm of each cell: means of both halves, and the halves."""
    rows = []
    for one in cells:
        speeds = {name: row["tokens_per_s"] for name, row in one["arms"].items()}
        for name, arm_speeds in speeds.items():
            over = {
                key: [round(a / b, 6) for a, b in zip(arm_speeds, speeds[other], strict=True)]
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
    that over none; a line an arm, a column a number of requests in flight, both halves. The last
    line is the planner over the rule.
    """
    blocks = []
    for data in dict.fromkeys(row["data"] for row in rows):
        by_arm = {(r["arm"], r["in_flight"]): r for r in rows if r["data"] == data}
        loads = sorted({load for _, load in by_arm})
        lines = [f"{data}, over {FIXED_EAGLE} (it: over none)"]
        lines.append(f"{'in flight':34}" + "".join(f"{load:>16}" for load in loads))
        for arm in dict.fromkeys(arm for arm, _ in by_arm):
            cells = (_cell(arm, by_arm.get((arm, load))) for load in loads)
            lines.append(f"{arm:34}" + "".join(f"{text:>16}" for text in cells))
        if ("rule", loads[0]) in by_arm and (PLANNER, loads[0]) in by_arm:
            ratios = (_ratio(by_arm[PLANNER, load], by_arm["rule", load]) for load in loads)
            lines.append(f"{PLANNER + ' / rule':34}" + "".join(f"{text:>16}" for text in ratios))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _ratio(row: dict[str, Any], over: dict[str, Any]) -> str:
    halves = zip(row["over_none_by_half"], over["over_none_by_half"], strict=True)
    return " ".join(f"{one / other:.3f}" for one, other in halves)


def _cell(arm: str, row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if arm == FIXED_EAGLE:
        return " ".join(f"{value:.3f}" for value in row["over_none_by_half"])
    return " ".join(f"{100 * (value - 1):+.1f}%" for value in row["over_fixed_eagle_by_half"])
