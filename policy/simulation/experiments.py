"""A comparison of arms: what is run at which load, and how results are set against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from policy.plan import FloatArray

from .arms import make_policy
from .deployment import Deployment, perturb
from .fleet import Run, simulate
from .statistics import Ratio, ratio_of_means, ratio_of_rates
from .workload import Drift, Mix, RequestLog, backlog, bursty, draw

BACKLOG = 0.0
"""The load of a point at which all requests are there from the start."""


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A deployment and a mix. ``rate_hz`` is the load 1: the request rate that its best fixed
    choice can just serve.

    ``variation`` is that of the gaps between arrivals. A run serves ``requests``, in a backlog four
    batches at least. ``table_error`` is by how much the times are off that policies read.
    ``recorded`` requests replace what is drawn.
    """

    name: str
    deployment: Deployment
    mix: Mix
    rate_hz: float = 1.0
    variation: float = 1.0
    requests: int = 200
    table_error: float = 0.2
    recorded: RequestLog | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One run: an arm at a load (of the scenario's rate, or ``BACKLOG``) with a seed."""

    arm: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The results kept of a run."""

    latency_s: FloatArray  # [N]
    first_token_s: FloatArray  # [N]
    tokens_per_s: float
    steps: int
    rows: float
    proposed: float
    accepted: float


def run_once(scenario: Scenario, task: Task) -> Run:
    """Simulate one task."""
    deployment, mix = scenario.deployment, scenario.mix
    if task.load == BACKLOG:
        arrivals, rate_hz = (
            backlog(max(scenario.requests, 4 * deployment.max_active)),
            scenario.rate_hz,
        )
    else:
        rate_hz = task.load * scenario.rate_hz
        arrivals = bursty(scenario.requests, rate_hz, scenario.variation, task.seed)
    period_s = mix.period_requests / rate_hz
    drift = Drift.swing(mix, deployment.drafts, period_s, 4 * len(arrivals) / rate_hz)
    workload = draw(
        mix,
        deployment.drafts,
        scenario.recorded or arrivals,
        task.seed,
        deployment.k_max,
        period_s,
        drift,
    )
    read = perturb(deployment.latency, scenario.table_error, task.seed)
    policy = make_policy(task.arm, deployment, mix, workload, read, task.seed)
    return simulate(deployment, workload, lambda: policy, task.seed)


def summary(run: Run) -> Result:
    """Return what is kept of a run."""
    columns = np.array([(step.rows, step.proposed, step.accepted) for step in run.steps], float)
    rows, proposed, accepted = columns.mean(0).tolist()
    return Result(
        run.latency_s, run.first_token_s, run.tokens_per_s, len(run.steps), rows, proposed, accepted
    )


Results = dict[Task, Result]


def pool(results: Results, arm: str, load: float, seeds: Iterable[int]) -> float:
    """Return the figure of merit of an arm at a load, lower is better: mean latency, or in a
    backlog seconds per token.
    """
    runs = [results[Task(arm, load, seed)] for seed in seeds]
    if load == BACKLOG:
        return float(np.mean([1 / run.tokens_per_s for run in runs]))
    return float(np.mean([run.latency_s.mean() for run in runs]))


def arm_ratio(results: Results, arm: str, other: str, load: float, seeds: Iterable[int]) -> Ratio:
    """Return an arm's latency over another's, or in a backlog its throughput over the other's."""
    pairs = [(results[Task(arm, load, seed)], results[Task(other, load, seed)]) for seed in seeds]
    if load == BACKLOG:
        return ratio_of_rates(
            [a.tokens_per_s for a, _ in pairs], [b.tokens_per_s for _, b in pairs]
        )
    return ratio_of_means([a.latency_s for a, _ in pairs], [b.latency_s for _, b in pairs])


@dataclass(slots=True)
class ArmComparison:
    """A scenario with what tuning chose (the best ``fixed`` choice by load; ``tuned`` by baseline),
    the arms by load and all results.
    """

    scenario: Scenario
    fixed: dict[float, str]
    tuned: dict[str, str]
    arms: dict[float, list[str]]
    results: Results


Runner = Callable[[Scenario, list[Task]], Results]
"""Runs tasks, in whatever order or number of processes."""


def compare_arms(
    scenario: Scenario, loads: list[float], arms: list[str], seeds: list[int], run: Runner
) -> ArmComparison:
    """Run given arms; the fixed choice marked best is the best of them in hindsight."""
    arms = list(dict.fromkeys([*arms, "adaptive"]))
    results = run(
        scenario, [Task(arm, load, seed) for load in loads for arm in arms for seed in seeds]
    )
    plain = [arm for arm in arms if arm == "none" or arm.startswith("fixed:")] or ["adaptive"]
    best = {load: min(plain, key=lambda arm: pool(results, arm, load, seeds)) for load in loads}
    return ArmComparison(scenario, best, {}, dict.fromkeys(loads, arms), results)
