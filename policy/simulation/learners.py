"""Arms that learn to select drafts in other ways, and the adaptive planner without one of its parts: for ``policy.simulation.regret``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.acceptance import AcceptanceConfig
from policy.latency import LatencyModel
from policy.plan import Outcome, Plan, Policy, View
from policy.planner import AdaptivePlanner
from policy.planner_state import PlannerConfig, PlannerState
from policy.published import SpinSelection, ThroughputBandit

from .deployment import Deployment


class Selected(Policy):
    """Drafts as another policy selects them, lengths as the priced optimiser has them for these drafts: selection alone is compared."""

    def __init__(self, selection: Policy, planner: AdaptivePlanner) -> None:
        self._selection, self._planner = selection, planner

    def start(self) -> tuple[Any, PlannerState]:
        """Return both states."""
        return self._selection.start(), self._planner.start()

    def plan(self, view: View, state: tuple[Any, PlannerState], now: float, rng: np.random.Generator) -> tuple[Plan, Any]:
        """Plan with no other draft than the one selected for each row."""
        selected, chosen = self._selection.plan(view, state[0], now, rng)
        own = selected.draft[:, None] == np.arange(len(view.drafts))
        plan, planned = self._planner.plan(replace(view, ceiling=np.where(own, view.ceiling, 0)), state[1], now, rng)
        return plan, (chosen, planned)

    def observe(self, outcome: Outcome, state: tuple[Any, PlannerState], now: float) -> Any:
        """Let both learn."""
        return self._selection.observe(outcome, state[0], now), self._planner.observe(outcome, state[1], now)

    def drift(self, state: tuple[Any, PlannerState]) -> dict[str, float]:
        """Return the planner's."""
        return self._planner.drift(state[1])


class _Deaf(AdaptivePlanner):
    """The planner without the scores of drafts that catch up; those of free drafts it keeps."""

    def __init__(self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig, free: tuple[bool, ...]) -> None:
        super().__init__(drafts, latency, config)
        self._free = np.array(free)

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        kept = self._free[outcome.free_draft]
        columns = {name: getattr(outcome, name)[kept] for name in ("free_request", "free_draft", "free_accepted", "free_scored")}
        return super().observe(replace(outcome, **columns), state, now)


WITHOUT = ("groups", "catch-up", "probes")
"""What ``without:...`` takes away from the adaptive planner."""


def _without(what: str, deployment: Deployment, read: LatencyModel) -> AdaptivePlanner:
    drafts, config = deployment.drafts, PlannerConfig(k_max=deployment.k_max, catchup_scored=True)
    match what:
        case "catch-up":
            return _Deaf(drafts, read, replace(config, catchup_scored=False), deployment.free)
        case "groups":
            return AdaptivePlanner(drafts, read, replace(config, acceptance=AcceptanceConfig(most_groups=0)))
    return AdaptivePlanner(drafts, read, replace(config, explore_share=0.0))


def learner(arm: str, deployment: Deployment, read: LatencyModel) -> Policy | None:
    """Return the policy of an arm that learns to select drafts in another way, or lacks a part; None for any other arm."""
    drafts, k_max = deployment.drafts, deployment.k_max
    config = PlannerConfig(k_max=k_max, catchup_scored=True)
    match arm.split(":"):
        case ["ucb" | "thompson" as mode, *share] if not share or _is_share(share):
            explore_share = float(share[0]) if share else config.explore_share
            return AdaptivePlanner(drafts, read, replace(config, selection=mode, explore_share=explore_share))
        case ["spin" | "bandit" as selection, "optimised"]:
            select = SpinSelection(drafts, k_max) if selection == "spin" else ThroughputBandit(drafts, [k_max])
            return Selected(select, AdaptivePlanner(drafts, read, replace(config, explore_share=0.0)))
        case ["bandit", length] if length.isdigit():
            return ThroughputBandit(drafts, [int(length)])
        case ["without", what] if what in WITHOUT:
            return _without(what, deployment, read)
    return None


def _is_share(words: list[str]) -> bool:
    return len(words) == 1 and words[0].replace(".", "", 1).isdigit()
