"""Where cohorts and cut contexts pay: the adaptive planner with and without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from policy.latency import LatencyCurve, LatencyModel
from policy.plan import Plan, View
from policy.shaped import ShapedPlanner
from policy.shapes import Shapes

from .arms import make_policy
from .deployment import Deployment, perturbed
from .fleet import Run, simulate
from .presets import CHAT, Linear, llama_8b_h100
from .statistics import Ratio, ratio_of_rates
from .workload import Category, Mix, backlog, draw

_TABLE_ERROR = 0.2


def _slow_draft() -> Deployment:
    """Return a made-up server whose draft is slow, and right nearly always: what SPIN's pipelining is for."""
    latency = LatencyModel(Linear(12.0, 0.05, 0.0, 0.0).curve(), (Linear(2.0, 0.02, 0.0, 0.0).curve(),))
    return Deployment("slow-draft", "made up: verifying 12 ms + 0.05 ms a token, drafting 2 ms + 0.02 ms a row", ("1b",), latency, (False,))


EVEN = Mix("even", (Category("chat", 1.0, 300, 150, {"1b": 0.97}),), {"1b": 0.98})


def _uneven(padding: bool) -> Deployment:
    """Return the 8B with contexts that weigh as much as its weights: 40 times the published price of a cached token."""
    latency = _with_context(llama_8b_h100().latency, 40.0)
    shapes = Shapes(pads=padding, merge_tokens=16.0)
    return replace(llama_8b_h100(), name="padded" if padding else "ragged", latency=latency, shapes=shapes)


def _with_context(latency: LatencyModel, factor: float) -> LatencyModel:
    """Return times with another price of cached tokens in the target."""
    target = latency.target
    dearer = LatencyCurve(target.base_s, target.slope_s, target.row_s, target.context_s * factor)
    return LatencyModel(dearer, latency.drafts, latency.overhead_s, latency.speculation_s)


LONG_AND_SHORT = Mix(
    "long-and-short",
    (Category("chat", 0.9, 100, 100, {"eagle": 0.7, "1b": 0.62}), Category("book", 0.1, 6000, 100, {"eagle": 0.8, "1b": 0.66})),
)

Cases = dict[str, tuple[str, list[tuple[str, Deployment, Mix]]]]
"""By name a title and (label, deployment, mix) of every point."""


def cases() -> Cases:
    """Return by case its title and (label, deployment, mix) of its points."""
    small, bound = llama_8b_h100(), _slow_draft()
    latency = replace(small.latency, drafts=small.latency.drafts[:1])
    memory = replace(small, drafts=("eagle",), latency=latency, free=(False,))
    contention = [1.0, 1.1, 1.25]
    return {
        "cohorts": (
            "Two cohorts against one, 16 in flight, by contention",
            [(f"slow-draft, {c:g}", _cohorts(bound, c), EVEN) for c in contention]
            + [(f"8B on H100, {c:g}", _cohorts(memory, c), CHAT) for c in contention],
        ),
        "decomposition": (
            "Contexts cut against padded, one in ten requests long, 32 in flight",
            [
                (name, replace(_uneven(pads), max_active=32), LONG_AND_SHORT)
                for name, pads in (("padding engine", True), ("ragged engine", False))
            ],
        ),
    }


def _cohorts(deployment: Deployment, contention: float) -> Deployment:
    return replace(deployment, max_active=16, shapes=Shapes(cohorts=2, contention=contention))


class Watched(ShapedPlanner):
    """Counts what was planned: steps, those with a shape, tokens, and reasons against."""

    def __init__(self, planner: ShapedPlanner) -> None:
        super().__init__(planner.drafts, planner.latency, planner.config, planner.shapes)
        self.counts: Counter[str] = Counter()

    def plan(self, view: View, state: Any, now: float, rng: np.random.Generator) -> tuple[Plan, Any]:
        """Plan, and count."""
        plan, after = super().plan(view, state, now, rng)
        self.counts["steps"] += 1
        self.counts["rows"] += len(view)
        self.counts["tokens"] += int(plan.length.sum())
        self.counts["shaped"] += plan.shape is not None
        for name, why in plan.notes["why_not"].items():
            self.counts[f"{name}: {why.split(':')[0]}"] += 1
        return plan, after


def run_point(case: str, label: str, deployment: Deployment, mix: Mix, seeds: list[int], requests_a_row: int = 4) -> dict[str, Any]:
    """Return a point of a case: throughput of a backlog with shapes over that of chains only, paired by seed."""
    rates: dict[str, list[float]] = {"adaptive": [], "chains-only": []}
    counts: Counter[str] = Counter()
    steps = 0
    for seed in seeds:
        requests = max(16, requests_a_row * deployment.max_active)
        workload = draw(mix, deployment.drafts, backlog(requests), seed, deployment.k_max, 1.0)
        for arm, found in rates.items():
            policy = make_policy(arm, deployment, mix, workload, perturbed(deployment.latency, _TABLE_ERROR, seed), seed)
            watched = Watched(policy) if isinstance(policy, ShapedPlanner) else policy
            run = simulate(deployment, workload, lambda chosen=watched: chosen, seed)  # type: ignore[misc]
            found.append(_tokens_per_s(run))
            steps += len(run.steps)
            if isinstance(watched, Watched):
                counts += watched.counts
    ratio = ratio_of_rates(rates["adaptive"], rates["chains-only"])
    return {"case": case, "point": label, **_described(ratio, rates, counts), "steps": steps}


def _tokens_per_s(run: Run) -> float:
    """Return the tokens per second of the steps that began with requests waiting, or of all where none waited."""
    return run.tokens_per_s or sum(step.emitted for step in run.steps) / run.end_s


def _described(ratio: Ratio, rates: dict[str, list[float]], counts: Counter[str]) -> dict[str, Any]:
    rows, steps = max(counts["rows"], 1), max(counts["steps"], 1)
    known = {"steps", "rows", "tokens", "shaped"}
    return {
        "tokens_per_s": round(float(np.mean(rates["adaptive"])), 1),
        "chains_tokens_per_s": round(float(np.mean(rates["chains-only"])), 1),
        "ratio": [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)],
        "shaped_share": round(counts["shaped"] / steps, 3),
        "tokens_a_row": round(counts["tokens"] / rows, 2),
        "why_not": {name: round(count / steps, 3) for name, count in counts.most_common() if name not in known and "engine" not in name},
    }


Map = Callable[[Any, list[tuple[Any, ...]]], list[Any]]


def run_cases(known: Cases, names: list[str], seeds: list[int], run: Map) -> list[dict[str, Any]]:
    """Return all points of the cases asked for."""
    return run(run_point, [(name, label, deployment, mix, seeds) for name in names for label, deployment, mix in known[name][1]])
