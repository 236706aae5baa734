"""Cohorts whether they pay or not: to measure them and to test the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.plan import Drafted, IntArray, Outcome, Plan, Policy, View


class ForcedCohorts(Policy):
    """A policy whose plans are cut into so many cohorts, whether that pays or not: to measure it
    and to test the loop.
    """

    def __init__(self, policy: Policy, cohorts: int) -> None:
        self.policy, self.cohorts = policy, cohorts

    def start(self) -> Any:
        """Return the policy's."""
        return self.policy.start()

    def plan(
        self, view: View, state: Any, now: float, rng: np.random.Generator
    ) -> tuple[Plan, Any]:
        """Plan, and cut a batch of which nothing is in flight; else what is ready is one of its
        cohorts.
        """
        plan, state = self.policy.plan(view, state, now, rng)
        ready = np.flatnonzero(view.ready)
        cohort = np.full(len(view), -1, np.int64)
        cohort[ready] = (
            0
            if len(ready) < len(view)
            else np.arange(len(view)) * self.cohorts // max(len(view), self.cohorts)
        )
        return replace(plan, flight=cohort), state

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Any) -> IntArray:
        """Return the policy's."""
        return self.policy.trim(view, plan, drafted, state)

    def observe(self, outcome: Outcome, state: Any, now: float) -> Any:
        """Let the policy learn."""
        return self.policy.observe(outcome, state, now)

    def stand_by(self, view: View, state: Any) -> Any:
        """Return the policy's."""
        return self.policy.stand_by(view, state)

    def drift(self, state: Any) -> dict[str, float]:
        """Return the policy's."""
        return self.policy.drift(state)
