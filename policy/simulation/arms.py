"""The arms of a comparison: baselines, the adaptive planner whole and without a part, and an oracle
that only a simulation can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from policy.acceptance import AcceptanceConfig, AcceptanceModel, AcceptanceState
from policy.baselines import BASELINES, BaselineSettings
from policy.custom import PolicyError, closest, load_policy, parse_path
from policy.guard import Guard
from policy.latency import LatencyModel
from policy.loops.acceptance import Chains
from policy.plan import (
    AnyPolicy,
    DraftNodes,
    FloatArray,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    View,
)
from policy.planner import AdaptivePlanner, PlannerConfig, PlannerState

from .deployment import Deployment, Work, step_parts
from .workload import Drift, Mix, Workload, backlog, draw

_PROFILE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROFILE_REQUESTS = 500

Truth = Callable[[IntArray, float], FloatArray]
"""The true hazards [n, drafts, positions] of requests at a time."""


class _KnownAcceptance(AcceptanceModel):
    """An estimator that knows the truth, and learns nothing."""

    def __init__(self, truth: Truth, drafts: int, k_max: int) -> None:
        super().__init__(drafts, k_max, AcceptanceConfig())
        self._truth = truth

    def admit(self, state: AcceptanceState, *requests: Any) -> AcceptanceState:
        del requests
        return state

    def decayed_to(self, state: AcceptanceState, now: float) -> AcceptanceState:
        return replace(state, now=now)

    def observe(
        self,
        state: AcceptanceState,
        step: Chains,
        emitted: IntArray,  # [n]
        free: Chains,
        steps: int = 1,
    ) -> tuple[AcceptanceState, IntArray]:
        del emitted, free, steps
        return state, np.full(len(step.request), -1)

    def hazards(
        self,
        state: AcceptanceState,
        request: IntArray,  # [n]
    ) -> FloatArray:
        hazard = self._truth(request, state.now).transpose(2, 1, 0)
        return np.ascontiguousarray(hazard, np.float64)


class OraclePlanner(AdaptivePlanner):
    """The planner with true hazards and true times: what is left to gain by knowing more."""

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        truth: Truth,
        config: PlannerConfig,
    ) -> None:
        config = replace(config, explore_share=0.0)
        truth_estimator = _KnownAcceptance(truth, len(drafts), config.k_max)
        super().__init__(drafts, latency, config, estimator=truth_estimator)


class _Lacking(AdaptivePlanner):
    """The adaptive planner without something that no constant switches off."""

    def __init__(self, lacks: str, deployment: Deployment, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lacks, self._free = lacks, np.array(deployment.free)

    def trim(self, view: View, plan: Plan, drafted: DraftNodes, state: PlannerState) -> IntArray:
        if self._lacks == "trim":
            return plan.length
        return super().trim(view, plan, drafted, state)

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        if self._lacks == "catch-up":
            free = outcome.free
            is_free = self._free[free.draft]
            columns = free.request, free.draft, free.accepted, free.scored, free.evidence
            columns_kept = (None if column is None else column[is_free] for column in columns)
            outcome = replace(outcome, free=FreeChains(*columns_kept))  # type: ignore[arg-type]
        after = super().observe(outcome, state, now)
        if self._lacks == "correction":
            after.correction = state.correction
        elif self._lacks == "shape":
            after.correction = replace(after.correction, applied=None)
        return after


WITHOUT: dict[str, dict[str, Any]] = {
    "deviation": {"acceptance": AcceptanceConfig(request_variance=1e-3)},
    "exploration": {"explore_share": 0.0},
    "waiting": {"waiting_price": False},
    "catch-up": {"catchup_scored": False},
    "correction": {},
    "shape": {},
    "trim": {},
}
"""Parts of the adaptive planner that ``without:PART`` takes away, with the constants for it."""

_SPELLED = ("draft", "length")
"""The settings of a baseline that an arm spells; a ``schedule`` is profiled instead."""


def arm_of(name: str, draft: str = "DRAFT", length: int | str = "K") -> str:
    """Return how the arm of a baseline is written; ``:NAME=VALUE`` sets one of its options."""
    needs, values = BASELINES[name].needs, (draft, str(length))
    spelled = (v for need, v in zip(_SPELLED, values, strict=True) if need in needs)
    return ":".join([name, *spelled])


def known_arms() -> str:
    """Return the arms of ``make_policy``, for an error or a help text."""
    return (
        f"{', '.join(map(arm_of, BASELINES))}, adaptive, guarded, oracle, "
        f"without:{'|'.join(WITHOUT)}, and your own: my_package.MyPolicy[:NAME=VALUE]"
    )


def profiled_lengths(deployment: Deployment, mix: Mix, draft: str, seed: int) -> dict[int, int]:
    """Return a table batch size -> length as profiling would fill it: the best V/T at true times
    and the mix's mean acceptance.
    """
    drift = Drift.none(len(mix.categories), len(deployment.drafts))
    arrivals = backlog(_PROFILE_REQUESTS)
    workload = draw(mix, deployment.drafts, arrivals, seed, deployment.k_max, 1.0, drift)
    column = deployment.drafts.index(draft)
    hazard = workload.acceptance.hazard(np.arange(len(workload)), 0.0)[:, column]
    match_rate = workload.acceptance.match_rate[:, column, None]
    survival = (np.cumprod(hazard, axis=1) * match_rate).mean(0)
    tokens = 1 + np.concatenate([[0.0], np.cumsum(survival)])
    context = int(workload.prompt_tokens.mean() + workload.output_tokens.mean() / 2)
    lengths = {}
    for rows in [b for b in _PROFILE_BATCHES if b <= deployment.max_active]:
        ones = np.ones(rows, np.int64)
        works = (
            Work(ones * column, ones * k, ones * k, ones, rows, rows * context)
            for k in range(deployment.k_max + 1)
        )
        seconds = [
            sum(step_parts(deployment.latency, work, deployment.drafts).values()) for work in works
        ]
        lengths[rows] = int(np.argmax(tokens / np.array(seconds)))
    return lengths


def make_policy(
    arm: str, deployment: Deployment, mix: Mix, workload: Workload, read: LatencyModel, seed: int
) -> AnyPolicy:
    """Return the policy of an arm; ``read`` is what it may know of times.

    ``known_arms`` lists them; a dotted path is a user's policy (``policy.custom``), followed by
    its options as ``:NAME=VALUE``. Raises PolicyError for any other.
    """
    drafts, k_max = deployment.drafts, deployment.k_max
    config = PlannerConfig(k_max=k_max, catchup_scored=True)
    policy: AnyPolicy
    match arm.split(":"):
        case [name, *words] if name in BASELINES:
            policy = _baseline(arm, words, deployment, mix, read, seed)
        case ["adaptive"]:
            policy = AdaptivePlanner(drafts, read, config)
        case ["guarded"]:
            policy = Guard(AdaptivePlanner(drafts, read, config))
        case ["without", part] if part in WITHOUT:
            config = replace(config, **WITHOUT[part])
            policy = _Lacking(part, deployment, drafts, read, config)
        case ["oracle"]:
            truth = workload.acceptance.hazard
            policy = OraclePlanner(drafts, deployment.latency, truth, config)
        case [name, *_] if "." in name:
            path, options = parse_path(arm)
            policy = load_policy(path, drafts, read, k_max, options)
        case _:
            raise _unknown(arm, drafts)
    return policy


def _unknown(arm: str, drafts: tuple[str, ...]) -> PolicyError:
    name = arm.partition(":")[0]
    where = f"there are {known_arms()}, with DRAFT one of {', '.join(drafts)}"
    like = closest(name, [*BASELINES, "adaptive", "guarded", "oracle"])
    if name in BASELINES:
        like = f"; did you mean {arm_of(name, drafts[0], 3)!r}?"
    return PolicyError(f"there is no arm {arm!r}: {where}{like}")


def _baseline(
    arm: str, words: list[str], deployment: Deployment, mix: Mix, read: LatencyModel, seed: int
) -> AnyPolicy:
    """Return a baseline from the words after its name. Raises PolicyError where they do not fit."""
    baseline = BASELINES[arm.partition(":")[0]]
    spelled = [need for need in _SPELLED if need in baseline.needs]
    _, options = parse_path(":".join(["", *(word for word in words if "=" in word)]))
    words = [word for word in words if "=" not in word]
    values = dict(zip(spelled, words, strict=False))
    draft, length = values.get("draft", deployment.drafts[0]), values.get("length", "0")
    if len(words) != len(spelled) or draft not in deployment.drafts or not length.isdigit():
        raise _unknown(arm, deployment.drafts)
    for name, value in options.items():
        if name not in baseline.options or type(value) is not int or value < 0:
            numbers = f"whole numbers for any of {list(baseline.options)}"
            raise PolicyError(f"{arm!r}: options must be {numbers}, got {name}={value!r}")
    profiled = "schedule" in baseline.needs
    return baseline.make(
        BaselineSettings(
            deployment.drafts,
            read,
            deployment.k_max,
            draft,
            int(length),
            profiled_lengths(deployment, mix, draft, seed) if profiled else {},
            options,
        )
    )


def check_arms(arms: Iterable[str], deployment: Deployment, mix: Mix) -> None:
    """Raise PolicyError, before anything is simulated, for an arm that there is not."""
    drift = Drift.none(len(mix.categories), len(deployment.drafts))
    workload = draw(mix, deployment.drafts, backlog(1), 0, deployment.k_max, 1.0, drift)
    for arm in arms:
        make_policy(arm, deployment, mix, workload, deployment.latency, 0)
