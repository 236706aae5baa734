"""The guard's worth where tables are wrong: passes with proposals that are dearer than any
table says, on a closed loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.simulation.arms import make_policy
from policy.simulation.deployment import Deployment, perturbed
from policy.simulation.fleet import simulate_closed
from policy.simulation.workload import Drift, Mix, backlog, draw

ARMS = "none", "adaptive", "guarded"
_TABLE_ERROR, _NOISE = 0.1, 0.05
_REQUESTS = 24  # for each in flight
_LEAST_REQUESTS = 60


def guard_row(
    deployment: Deployment, mix: Mix, factor: float, in_flight: int, seed: int
) -> dict[str, Any]:
    """Return tokens per second by arm where the decoding rows of a pass with proposals take
    ``factor`` times what the table says, with the steps that a guarded run took.
    """
    deployment = replace(deployment, proposing_factor=factor, noise=_NOISE)
    requests = max(_LEAST_REQUESTS, _REQUESTS * in_flight)
    drift = Drift.none(len(mix.categories), len(deployment.drafts))
    arrivals = backlog(requests)
    work = draw(mix, deployment.drafts, arrivals, seed, deployment.k_max, 1.0, drift)
    read = perturbed(deployment.latency, _TABLE_ERROR, seed)
    row: dict[str, Any] = {"deployment": deployment.name, "factor": factor}
    row |= {"in_flight": in_flight, "seed": seed}
    for arm in ARMS:
        policy = make_policy(arm, deployment, mix, work, read, seed)
        run = simulate_closed(deployment, work, policy, seed, in_flight)
        seconds = sum(step.seconds for step in run.steps)
        row[arm] = round(sum(step.emitted for step in run.steps) / seconds, 3)
        row["steps"] = len(run.steps)
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by deployment, factor and load the adaptive and the guarded arm over none, and the
    guarded one over the adaptive, geometric means over seeds.
    """
    cells: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["deployment"], row["factor"], row["in_flight"]), []).append(row)
    return [
        {
            **dict(zip(("deployment", "factor", "in_flight"), cell, strict=True)),
            "adaptive_over_none": _mean(found, "adaptive", "none"),
            "guarded_over_none": _mean(found, "guarded", "none"),
            "guarded_over_adaptive": _mean(found, "guarded", "adaptive"),
            "steps": int(np.mean([row["steps"] for row in found])),
        }
        for cell, found in cells.items()
    ]


def _mean(rows: list[dict[str, Any]], one: str, other: str) -> float:
    ratios = np.log([row[one] / row[other] for row in rows])
    return round(float(np.exp(ratios.mean())), 3)
