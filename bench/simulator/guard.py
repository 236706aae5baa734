"""The guard's worth where tables are wrong: passes with proposals that are dearer than any
table says, on a closed loop; and what it costs that a pass of another width takes longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.simulation.arms import make_policy
from policy.simulation.deployment import Deployment, perturb
from policy.simulation.fleet import simulate_closed
from policy.simulation.replica import StepRecord
from policy.simulation.workload import Drift, Mix, backlog, draw

ARMS = "none", "adaptive", "guarded"
_TABLE_ERROR, _NOISE = 0.1, 0.05
_REQUESTS = 24  # for each in flight
_LEAST_REQUESTS = 60
SMALL_TOKENS, MOST_IN_VAIN = 4, 1
"""A step that drafts more tokens than the first, for the whole batch, and verifies no more nodes
than the second has drafted in vain.
"""


def guard_row(
    deployment: Deployment, mix: Mix, factor: float, in_flight: int, seed: int, change_tokens: int
) -> dict[str, Any]:
    """Return tokens per second by arm where the decoding rows of a pass with proposals take
    ``factor`` times what the table says, and ``change_tokens`` are as in ``Deployment``; with the
    steps that a guarded run took, and by arm the share of steps with a draft, and of these the
    share that were drafted in vain.
    """
    deployment = replace(
        deployment, proposing_factor=factor, noise=_NOISE, change_tokens=change_tokens
    )
    requests = max(_LEAST_REQUESTS, _REQUESTS * in_flight)
    drift = Drift.none(len(mix.categories), len(deployment.drafts))
    arrivals = backlog(requests)
    work = draw(mix, deployment.drafts, arrivals, seed, deployment.k_max, 1.0, drift)
    read = perturb(deployment.latency, _TABLE_ERROR, seed)
    row: dict[str, Any] = {"deployment": deployment.name, "factor": factor}
    row |= {"in_flight": in_flight, "seed": seed}
    for arm in ARMS:
        policy = make_policy(arm, deployment, mix, work, read, seed)
        run = simulate_closed(deployment, work, policy, seed, in_flight)
        row[arm] = _goodput(run.steps)
        row[f"{arm}_first_third"] = _goodput(run.steps[: len(run.steps) // 3])
        if arm == "guarded":
            row["steps"] = len(run.steps)
        drafted = [step.verified for step in run.steps if step.drafted > SMALL_TOKENS]
        in_vain = sum(verified <= MOST_IN_VAIN for verified in drafted)
        row[f"{arm}_drafted"] = round(len(drafted) / len(run.steps), 4)
        row[f"{arm}_in_vain"] = round(in_vain / len(drafted), 3) if drafted else 0.0
    return row


def _goodput(steps: list[StepRecord]) -> float:
    return round(sum(step.emitted for step in steps) / sum(step.seconds for step in steps), 3)


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
            "adaptive_over_none": _mean(runs, "adaptive", "none"),
            "guarded_over_none": _mean(runs, "guarded", "none"),
            "guarded_over_adaptive": _mean(runs, "guarded", "adaptive"),
            "first_third": _mean(runs, "guarded_first_third", "none_first_third"),
            "drafted": round(float(np.mean([row["guarded_drafted"] for row in runs])), 4),
            "in_vain": round(float(np.mean([row["guarded_in_vain"] for row in runs])), 3),
            "steps": int(np.mean([row["steps"] for row in runs])),
        }
        for cell, runs in cells.items()
    ]


def _mean(rows: list[dict[str, Any]], one: str, other: str) -> float:
    ratios = np.log([row[one] / row[other] for row in rows])
    return round(float(np.exp(ratios.mean())), 3)
