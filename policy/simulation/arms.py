"""The arms of a comparison: baselines, the adaptive planner, and two that only a simulation can have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from policy.acceptance import AcceptanceModel, AcceptanceState, Expected
from policy.baselines import BatchSchedule, FixedLength, NoSpeculation
from policy.custom import PolicyError, made
from policy.goodput import StepProblem
from policy.latency import LatencyModel
from policy.plan import FloatArray, IntArray, Policy, View
from policy.planner import AdaptivePlanner
from policy.planner_state import PlannerConfig, PlannerState
from policy.published import AcceptanceEma, SmartSpec, SpinSelection
from policy.search import Priced
from policy.shaped import ShapedPlanner
from policy.shapes import Shapes

from .deployment import Deployment, Work, step_parts
from .learners import WITHOUT, learner
from .workload import Drift, Mix, Workload, backlog, draw

KNOWN = (
    "none, fixed:DRAFT:K, schedule:DRAFT, ema:DRAFT, smartspec:DRAFT, spin:K, bandit:K, adaptive, "
    "chains-only, ucb[:SHARE], thompson[:SHARE], spin:optimised, bandit:optimised, "
    f"without:{'|'.join(WITHOUT)}, per-step, oracle, and your own: my_package.MyPolicy[:NAME=VALUE]"
)
"""The arms of ``make_policy``, for who mistypes one.

``chains-only`` is adaptive but for the deployment's shapes; ``ucb`` and ``thompson`` are adaptive
in these modes of selection, SHARE another share of time to explore; ``:optimised`` takes their
drafts and our lengths; ``without:`` is adaptive without a part (``learners``).
"""

_PROFILE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROFILE_REQUESTS = 500

Truth = Callable[[IntArray, float], FloatArray]
"""The true hazards [n, drafts, positions] of requests at a time."""


class PerStepGoodput(AdaptivePlanner):
    """The adaptive planner with the plain objective V/T of the step, its prefill included and nobody's wait for it."""

    def _priced_choice(self, problem: StepProblem, prefill_s: float, view: View, state: PlannerState) -> Priced:
        del prefill_s
        return super()._priced_choice(problem, 0.0, replace(view, prefilling=0), state)


class _Known(AcceptanceModel):
    """An estimator that knows the truth."""

    def __init__(self, truth: Truth, drafts: int, k_max: int) -> None:
        super().__init__(drafts, k_max, PlannerConfig().acceptance)
        self._truth = truth

    def admit(self, state: AcceptanceState, requests: list[int], group: list[int] | None = None) -> AcceptanceState:
        del requests, group
        return state

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        del requests
        return state

    def aged(self, state: AcceptanceState, now: float) -> AcceptanceState:
        return replace(state, now=now)

    def observe(self, state: AcceptanceState, *evidence: Any, **more: Any) -> AcceptanceState:
        del evidence, more
        return state

    def expected(self, state: AcceptanceState, request: list[int]) -> Expected:
        hazard = self._truth(np.array(request, np.int64), state.now)
        return Expected(np.zeros(len(request), np.int64), hazard)


class Oracle(AdaptivePlanner):
    """The planner's own optimiser with true hazards and true times: what is left to gain by knowing more."""

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, truth: Truth, k_max: int) -> None:
        super().__init__(drafts, latency, PlannerConfig(k_max=k_max, explore_share=0.0, margin=0.0, rest_steps=0))
        self._acceptance = _Known(truth, len(drafts), k_max)


def profiled_lengths(deployment: Deployment, mix: Mix, draft: str, seed: int) -> dict[int, int]:
    """Return a table batch size -> length as profiling would fill it: the best V/T at true times and the mix's mean acceptance."""
    workload = draw(mix, deployment.drafts, backlog(_PROFILE_REQUESTS), seed, deployment.k_max, 1.0, Drift.none(len(mix.categories), 2))
    everyone = np.arange(len(workload))
    column = deployment.drafts.index(draft)
    survival = np.cumprod(workload.acceptance.hazard(everyone, 0.0)[:, column], axis=1)
    tokens = 1 + np.concatenate([[0.0], np.cumsum((survival * workload.acceptance.found[:, column, None]).mean(0))])
    context = int(workload.prompt_tokens.mean() + workload.output_tokens.mean() / 2)
    lengths = {}
    for rows in [b for b in _PROFILE_BATCHES if b <= deployment.max_active]:
        ones = np.ones(rows, np.int64)
        times = [
            sum(step_parts(deployment.latency, Work(ones * column, ones * k, ones, rows, rows * context), deployment.drafts).values())
            for k in range(deployment.k_max + 1)
        ]
        lengths[rows] = int(np.argmax(tokens / np.array(times)))
    return lengths


def make_policy(arm: str, deployment: Deployment, mix: Mix, workload: Workload, read: LatencyModel, seed: int) -> Policy:  # noqa: PLR0911
    """Return the policy of an arm; ``read`` is what it may know of times.

    ``KNOWN`` lists the arms; a dotted path is a user's policy (``policy.custom``), behind it
    ``:NAME=VALUE`` its options. Raises PolicyError for any other.
    """
    kind, *rest = arm.split(":")
    drafts, k_max = deployment.drafts, deployment.k_max
    match kind, *rest:
        case ["none"]:
            return NoSpeculation()
        case ["fixed", draft, length] if draft in drafts and length.isdigit():
            return FixedLength(draft, int(length))
        case ["schedule", draft] if draft in drafts:
            return BatchSchedule(draft, profiled_lengths(deployment, mix, draft, seed))
        case ["ema", draft] if draft in drafts:
            return AcceptanceEma(draft)
        case ["smartspec", draft] if draft in drafts:
            return SmartSpec(drafts, draft, read, k_max)
        case ["spin", length] if length.isdigit():
            return SpinSelection(drafts, int(length))
        case ["adaptive"] if deployment.shapes != Shapes():
            return ShapedPlanner(drafts, read, PlannerConfig(k_max=k_max, catchup_scored=True), deployment.shapes)
        case ["adaptive"] | ["chains-only"]:
            return AdaptivePlanner(drafts, read, PlannerConfig(k_max=k_max, catchup_scored=True))
        case ["per-step"]:
            return PerStepGoodput(drafts, read, PlannerConfig(k_max=k_max, catchup_scored=True))
        case ["oracle"]:
            return Oracle(drafts, deployment.latency, workload.acceptance.hazard, k_max)
        case [path, *options] if "." in path:
            return made(path, drafts, read, k_max, _options(arm, options))
    if (found := learner(arm, deployment, read)) is not None:
        return found
    raise PolicyError(f"there is no arm {arm!r}: there are {KNOWN}, with DRAFT one of {drafts}")


def check_arms(arms: Iterable[str], deployment: Deployment, mix: Mix) -> None:
    """Raise PolicyError, before anything is simulated, for an arm that there is not."""
    drift = Drift.none(len(mix.categories), len(deployment.drafts))
    workload = draw(mix, deployment.drafts, backlog(1), 0, deployment.k_max, 1.0, drift)
    for arm in arms:
        make_policy(arm, deployment, mix, workload, deployment.latency, 0)


def _options(arm: str, words: list[str]) -> dict[str, Any]:
    """Return the options of ``NAME=VALUE``; a value is JSON, or else the text as it is."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise PolicyError(f"{arm!r}: an option must be NAME=VALUE, got {word!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
