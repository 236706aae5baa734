"""Regret: what not knowing the requests' acceptance costs, request by request, by the ways to learn it.

The regret of a request is its latency less that of the same request under the oracle (the same optimiser, true hazards and times), on the
same arrivals and random numbers. Summed in order of arrival it shows whether a way to learn ever stops paying. Policies read exact times
here, so that nothing but acceptance has to be learnt. The oracle is as short-sighted as the planner: a regret may be negative.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from policy.plan import FloatArray

from .experiments import Result, Results, Runner, Scenario, Task, compared
from .workload import Mix

FULL = "full information"
SELECTIONS = {
    "probing": "adaptive",
    "ucb": "ucb",
    "thompson": "thompson",
    "ucb, 5 % of time": "ucb:0.05",
    "thompson, 5 % of time": "thompson:0.05",
    "explore then commit (SPIN), our lengths": "spin:optimised",
    "explore then commit (SPIN), k = 3": "spin:3",
    "UCB on tokens/s, our lengths": "bandit:optimised",
    FULL: "adaptive",
}
"""Ways to select drafts, by name, with their arms."""

ABLATIONS = {
    "probing without probes": "without:probes",
    "probing without catch-up scores": "without:catch-up",
    "probing without groups": "without:groups",
}
"""What a part of the planner brings."""

_CURVE_POINTS = 60


def steady(mix: Mix) -> Mix:
    """Return the mix without drift."""
    return replace(mix, name=f"{mix.name}-steady", categories=tuple(replace(category, swing={}) for category in mix.categories))


def regret(scenario: Scenario, load: float, seeds: list[int], run: Runner, names: Collection[str]) -> dict[str, Any]:
    """Run the ways of these names, and the oracle, and return their regrets as JSON-able data. Without tags there are no groups to miss."""
    ways = {name: arm for name, arm in (SELECTIONS | ABLATIONS).items() if name in names}
    if not scenario.mix.grouped:
        ways.pop("probing without groups", None)
    arms = list(dict.fromkeys(["oracle", "adaptive", *(arm for name, arm in ways.items() if name != FULL)]))
    results = run(scenario, [Task(arm, load, seed) for arm in arms for seed in seeds])
    if FULL in ways:
        informed = replace(scenario, deployment=replace(scenario.deployment, full_information=True))
        told = run(informed, [Task("adaptive", load, seed) for seed in seeds])
        results |= {replace(task, arm=FULL): result for task, result in told.items()}
        ways[FULL] = FULL
    oracle = [results[Task("oracle", load, seed)].latency_s for seed in seeds]
    return {
        "scenario": scenario.name,
        "mix": scenario.mix.name,
        "load": load,
        "rate_hz": scenario.rate_hz,
        "requests": scenario.requests,
        "seeds": seeds,
        "oracle_latency_s": _figure(float(np.mean(oracle))),
        "ways": [_way(name, arm, load, seeds, oracle, results) for name, arm in ways.items()],
    }


def _way(name: str, arm: str, load: float, seeds: list[int], oracle: list[FloatArray], results: Results) -> dict[str, Any]:
    """Return a way's regret in seconds of latency: a request, in the halves of a run, and summed up to each of some requests."""
    runs: list[Result] = [results[Task(arm, load, seed)] for seed in seeds]
    lost = np.array([run.latency_s - best for run, best in zip(runs, oracle, strict=True)])
    half = lost.shape[1] // 2
    places = np.unique(np.linspace(0, lost.shape[1] - 1, _CURVE_POINTS).astype(int))
    ratio = compared(results, arm, "adaptive", load, seeds)
    return {
        "way": name,
        "arm": arm,
        "latency_s": _figure(float(np.mean([run.latency_s.mean() for run in runs]))),
        "regret_s": _figure(float(lost.mean())),
        "by_seed_s": [_figure(float(row.mean())) for row in lost],
        "first_half_s": _figure(float(lost[:, :half].mean())),
        "second_half_s": _figure(float(lost[:, half:].mean())),
        "of_latency": _figure(float(lost.mean() / np.mean(oracle))),
        "over_probing": [_figure(value) for value in (ratio.value, ratio.low, ratio.high)],
        "curve": {"request": (places + 1).tolist(), "regret_s": [_figure(v) for v in np.cumsum(lost.mean(0))[places].tolist()]},
    }


def _figure(value: float) -> float:
    return float(f"{value:.4g}")
