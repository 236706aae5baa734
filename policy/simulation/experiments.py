"""The protocol of a comparison: what is run at which load, choices made on some seeds and reported
on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import numpy as np

from policy.baselines import compared as compared_baselines
from policy.plan import Drafted, FloatArray, IntArray, Outcome, Plan, View
from policy.planner import AdaptivePlanner, PlannerConfig, PlannerState

from .arms import arm_of, make_policy
from .deployment import Deployment, perturbed
from .fleet import Run, simulate, simulate_closed
from .statistics import Ratio, ratio_of_means, ratio_of_rates
from .workload import Drift, Mix, Recorded, backlog, bursty, draw

BACKLOG = 0.0
"""The load of a point at which all requests are there from the start."""

_STANDING_HZ = 1e-3

FIXED_LENGTHS = (1, 2, 3, 5, 8)
_TUNED_LENGTHS = (2, 3, 5)


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A deployment and a mix. ``rate_hz`` is the load 1: the request rate that its best fixed
    choice can just serve.

    ``variation`` is that of the gaps between arrivals. A run serves ``requests``, in a backlog four
    batches at least; with ``equal_time`` that is for load 0.2, and higher loads serve so many more
    that they last as long. ``table_error`` is by how much the times are off that policies read.
    ``recorded`` requests replace what is drawn.
    """

    name: str
    deployment: Deployment
    mix: Mix
    rate_hz: float = 1.0
    variation: float = 1.0
    requests: int = 200
    equal_time: bool = False
    table_error: float = 0.2
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One run: an arm at a load (of the scenario's rate, or ``BACKLOG``) with a seed."""

    arm: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What is kept of a run."""

    latency_s: FloatArray
    first_token_s: FloatArray
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
        count = (
            max(scenario.requests, round(task.load / 0.2 * scenario.requests))
            if scenario.equal_time
            else scenario.requests
        )
        arrivals = bursty(count, rate_hz, scenario.variation, task.seed)
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
    read = perturbed(deployment.latency, scenario.table_error, task.seed)
    policy = make_policy(task.arm, deployment, mix, workload, read, task.seed)
    return simulate(deployment, workload, lambda: policy, task.seed)


class _Timed(AdaptivePlanner):
    """The adaptive planner, and the CPU seconds that each of its plans took with what it learnt."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.took_s: list[float] = []

    def plan(
        self, view: View, state: PlannerState, now: float, rng: np.random.Generator
    ) -> tuple[Plan, PlannerState]:
        began = thread_time()
        planned = super().plan(view, state, now, rng)
        self.took_s.append(thread_time() - began)
        return planned

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: PlannerState) -> IntArray:
        began = thread_time()
        nodes = super().trim(view, plan, drafted, state)
        self.took_s[-1] += thread_time() - began
        return nodes

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        began = thread_time()
        after = super().observe(outcome, state, now)
        self.took_s[-1] += thread_time() - began
        return after


def planning_cost(deployment: Deployment, mix: Mix) -> tuple[tuple[int, float], ...]:
    """Return what planning and learning take on this machine by batch size, as
    ``Deployment.planning_s``: medians of CPU seconds in closed loops.
    """
    costs, drift = [], Drift.none(len(mix.categories), len(deployment.drafts))
    for rows in (1, 4, 16, 64):
        if rows <= deployment.max_active:
            requests = backlog(max(4, 2 * rows))
            workload = draw(mix, deployment.drafts, requests, 0, deployment.k_max, 1.0, drift)
            config = PlannerConfig(k_max=deployment.k_max, catchup_scored=True)
            policy = _Timed(deployment.drafts, deployment.latency, config)
            simulate_closed(deployment, workload, policy, 0, rows)
            costs.append((rows, float(np.median(policy.took_s))))
    return tuple(costs)


def summary(run: Run) -> Result:
    """Return what is kept of a run."""
    columns = np.array([(step.rows, step.proposed, step.accepted) for step in run.steps], float)
    rows, proposed, accepted = columns.mean(0).tolist()
    return Result(
        run.latency_s, run.first_token_s, run.tokens_per_s, len(run.steps), rows, proposed, accepted
    )


def fixed_arms(deployment: Deployment) -> list[str]:
    """Return no speculation and all fixed choices on a grid of lengths."""
    return [
        "none",
        *(
            f"fixed:{draft}:{k}"
            for draft in deployment.drafts
            for k in FIXED_LENGTHS
            if k <= deployment.k_max
        ),
    ]


def tuned_arms(deployment: Deployment) -> dict[str, list[str]]:
    """Return by baseline the variants of which tuning picks one per scenario."""
    return {
        name: [
            arm_of(name, draft, k)
            for draft in (deployment.drafts if "draft" in baseline.needs else ("",))
            for k in (_TUNED_LENGTHS if "length" in baseline.needs else (0,))
        ]
        for name, baseline in compared_baselines().items()
    }


Results = dict[Task, Result]


def pooled(results: Results, arm: str, load: float, seeds: Iterable[int]) -> float:
    """Return the figure of merit of an arm at a load, lower is better: mean latency, or in a
    backlog seconds per token.
    """
    runs = [results[Task(arm, load, seed)] for seed in seeds]
    if load == BACKLOG:
        return float(np.mean([1 / run.tokens_per_s for run in runs]))
    return float(np.mean([run.latency_s.mean() for run in runs]))


def compared(results: Results, arm: str, other: str, load: float, seeds: Iterable[int]) -> Ratio:
    """Return an arm's latency over another's, or in a backlog its throughput over the other's."""
    pairs = [(results[Task(arm, load, seed)], results[Task(other, load, seed)]) for seed in seeds]
    if load == BACKLOG:
        return ratio_of_rates(
            [a.tokens_per_s for a, _ in pairs], [b.tokens_per_s for _, b in pairs]
        )
    return ratio_of_means([a.latency_s for a, _ in pairs], [b.latency_s for _, b in pairs])


def captured(results: Results, arm: str, fixed: str, load: float, seeds: list[int]) -> float:
    """Return which share of the gap between a fixed choice and the oracle an arm captures."""
    cost = {name: pooled(results, name, load, seeds) for name in (arm, fixed, "oracle")}
    gap = cost[fixed] - cost["oracle"]
    return (cost[fixed] - cost[arm]) / gap if gap else 0.0


@dataclass(slots=True)
class Comparison:
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


def nominal_rate(scenario: Scenario, seeds: list[int], run: Runner) -> float:
    """Return the requests per second that the best fixed choice serves from a backlog, acceptance
    standing still.
    """
    arms = fixed_arms(scenario.deployment)
    results = run(
        replace(scenario, rate_hz=_STANDING_HZ),
        [Task(arm, BACKLOG, seed) for arm in arms for seed in seeds],
    )
    mean_tokens = sum(c.share * c.output_tokens for c in scenario.mix.categories) / sum(
        c.share for c in scenario.mix.categories
    )
    return 1 / (min(pooled(results, arm, BACKLOG, seeds) for arm in arms) * mean_tokens)


def compare(
    scenario: Scenario, loads: list[float], tuning: list[int], reporting: list[int], run: Runner
) -> Comparison:
    """Choose fixed choices and the baselines' variants on the tuning seeds, then run every arm on
    the reporting seeds.
    """
    fixed, variants = fixed_arms(scenario.deployment), tuned_arms(scenario.deployment)
    candidates = [*fixed, *(arm for arms in variants.values() for arm in arms)]
    results = run(
        scenario, [Task(arm, load, seed) for arm in candidates for load in loads for seed in tuning]
    )
    best = {load: min(fixed, key=lambda arm: pooled(results, arm, load, tuning)) for load in loads}
    tuned = {}
    for name, options in variants.items():
        tuned[name] = min(
            options,
            key=lambda arm: sum(np.log(pooled(results, arm, load, tuning)) for load in loads),
        )
    arms = {
        load: list(dict.fromkeys(["none", best[load], *tuned.values(), "adaptive", "oracle"]))
        for load in loads
    }
    reported = run(
        scenario,
        [Task(arm, load, seed) for load in loads for arm in arms[load] for seed in reporting],
    )
    return Comparison(scenario, best, tuned, arms, reported)


def compare_arms(
    scenario: Scenario, loads: list[float], arms: list[str], seeds: list[int], run: Runner
) -> Comparison:
    """Run given arms; the fixed choice marked best is the best of them in hindsight."""
    arms = list(dict.fromkeys([*arms, "adaptive"]))
    results = run(
        scenario, [Task(arm, load, seed) for load in loads for arm in arms for seed in seeds]
    )
    plain = [arm for arm in arms if arm == "none" or arm.startswith("fixed:")] or ["adaptive"]
    best = {load: min(plain, key=lambda arm: pooled(results, arm, load, seeds)) for load in loads}
    return Comparison(scenario, best, {}, dict.fromkeys(loads, arms), results)
