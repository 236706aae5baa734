"""Fleets: identical replicas after a router at the same load each."""

from __future__ import annotations

from typing import Any

import numpy as np

from policy.simulation.arms import make_policy
from policy.simulation.deployment import perturb
from policy.simulation.experiments import Scenario
from policy.simulation.fleet import simulate
from policy.simulation.workload import Drift, bursty, draw

NOTE = (
    "Every fleet gets the same load per replica, by the router that picks the fewest outstanding "
    "requests. Replicas are identical and "
    "differ only by what they are sent, so that figures per replica settle as the fleet grows: "
    "where two sizes agree, a larger fleet needs "
    "no simulation."
)


def fleet_row(
    scenario: Scenario, arm: str, replicas: int, load: float, requests_each: int, seed: int
) -> dict[str, Any]:
    """Simulate a fleet and return its figures; every replica has a policy and a state of its
    own.
    """
    deployment, mix = scenario.deployment, scenario.mix
    rate_hz = load * scenario.rate_hz * replicas
    arrivals = bursty(requests_each * replicas, rate_hz, scenario.variation, seed)
    period_s = mix.period_requests / (load * scenario.rate_hz)
    drift = Drift.swing(mix, deployment.drafts, period_s, 4 * float(arrivals[-1]))
    workload = draw(mix, deployment.drafts, arrivals, seed, deployment.k_max, period_s, drift)
    read = perturb(deployment.latency, scenario.table_error, seed)
    run = simulate(
        deployment,
        workload,
        lambda: make_policy(arm, deployment, mix, workload, read, seed),
        seed,
        replicas,
    )
    last_s = float(arrivals[-1])
    return {
        "replicas": replicas,
        "arm": arm,
        "requests": len(workload),
        "steps": len(run.steps),
        "latency_s": run.mean_latency_s,
        "latency_p95_s": float(np.quantile(run.latency_s, 0.95)),
        "tokens_per_s": sum(step.emitted for step in run.steps if step.start_s < last_s) / last_s,
    }
