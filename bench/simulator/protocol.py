"""The protocol of the evidence: choices are made on some seeds and reported on others, and planning
is charged at what it takes on this machine.
"""

from __future__ import annotations

from dataclasses import replace
from time import thread_time
from typing import Any

import numpy as np

from bench.baselines import compared_baselines
from policy.baselines import Baseline
from policy.plan import DraftNodes, IntArray, Outcome, Plan, View
from policy.planner import AdaptivePlanner, PlannerConfig, PlannerState
from policy.simulation.arms import arm_of
from policy.simulation.deployment import Deployment
from policy.simulation.experiments import (
    BACKLOG,
    ArmComparison,
    Results,
    Runner,
    Scenario,
    Task,
    pool,
)
from policy.simulation.fleet import simulate_closed
from policy.simulation.workload import Drift, Mix, backlog, draw

FIXED_LENGTHS = (1, 2, 3, 5, 8)
_TUNED_LENGTHS = (2, 3, 5)
_STANDING_HZ = 1e-3


class _TimedPlanner(AdaptivePlanner):
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

    def trim(self, view: View, plan: Plan, drafted: DraftNodes, state: PlannerState) -> IntArray:
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
            policy = _TimedPlanner(deployment.drafts, deployment.latency, config)
            simulate_closed(deployment, workload, policy, 0, rows)
            costs.append((rows, float(np.median(policy.took_s))))
    return tuple(costs)


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
    """Return the variants of each baseline; tuning picks one of them per scenario."""
    return {
        name: [
            _arm_of(name, baseline, draft, k)
            for draft in (deployment.drafts if "draft" in baseline.needs else ("",))
            for k in (_TUNED_LENGTHS if "length" in baseline.needs else (0,))
        ]
        for name, baseline in compared_baselines().items()
    }


def _arm_of(name: str, baseline: Baseline, draft: str, length: int) -> str:
    """Return how the simulator's arm of a baseline is written."""
    if not baseline.path:
        return arm_of(name, draft, length)
    values = {"draft": draft, "length": length}
    return ":".join([baseline.path, *(f"{need}={values[need]}" for need in baseline.needs)])


def share_captured(results: Results, arm: str, fixed: str, load: float, seeds: list[int]) -> float:
    """Return which share of the gap between a fixed choice and the oracle an arm captures."""
    cost = {name: pool(results, name, load, seeds) for name in (arm, fixed, "oracle")}
    gap = cost[fixed] - cost["oracle"]
    return (cost[fixed] - cost[arm]) / gap if gap else 0.0


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
    return 1 / (min(pool(results, arm, BACKLOG, seeds) for arm in arms) * mean_tokens)


def compare(
    scenario: Scenario, loads: list[float], tuning: list[int], reporting: list[int], run: Runner
) -> ArmComparison:
    """Choose fixed choices and the baselines' variants on the tuning seeds, then run every arm on
    the reporting seeds.
    """
    fixed, variants = fixed_arms(scenario.deployment), tuned_arms(scenario.deployment)
    candidates = [*fixed, *(arm for arms in variants.values() for arm in arms)]
    results = run(
        scenario, [Task(arm, load, seed) for arm in candidates for load in loads for seed in tuning]
    )
    best = {load: min(fixed, key=lambda arm: pool(results, arm, load, tuning)) for load in loads}
    tuned = {}
    for name, options in variants.items():
        tuned[name] = min(
            options,
            key=lambda arm: sum(np.log(pool(results, arm, load, tuning)) for load in loads),
        )
    arms = {
        load: list(dict.fromkeys(["none", best[load], *tuned.values(), "adaptive", "oracle"]))
        for load in loads
    }
    reported = run(
        scenario,
        [Task(arm, load, seed) for load in loads for arm in arms[load] for seed in reporting],
    )
    return ArmComparison(scenario, best, tuned, arms, reported)
