"""Runs the policy: one that fails costs a step its speculation, never a request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from backend.ops.stats import StepStats
from backend.speculation.decision_log import DecisionLog
from backend.speculation.plan_metrics import PlanMetrics
from backend.speculation.step_log import StepLog
from policy import AnyPolicy, DraftNodes, IntArray, NoSpeculation, Outcome, Plan, View
from policy.guard import GuardVerdict, guard_in
from policy.wrappers import within

logger = logging.getLogger(__name__)

LOG_PERIOD_S = 10.0
"""Least seconds between two log lines of a policy that fails; ``spindle_fallback_total`` counts
every failure.
"""


class PolicyRunner:
    """Owns the policy and its state, and survives what the policy raises; for the loop's thread.

    Other threads may read its public fields: the state is an immutable value.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        drafts: tuple[str, ...],
        stats: StepStats,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self.policy = policy
        self.state: Any = policy.start()
        self.last_plan: tuple[View, Any, Plan, float] | None = None
        """The view, the state that the plan was made from, the plan, and when (seconds)."""
        self.metrics = PlanMetrics(stats)
        self._stats = stats
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._decisions = DecisionLog(drafts)
        self._silent_until_s = -math.inf
        self._guard = guard_in(policy)
        self._guard_samples = -1  # what was restored is shown, too

    def change(
        self, policy: AnyPolicy, state: Any, drafts: tuple[str, ...] | None = None
    ) -> tuple[AnyPolicy, Any]:
        """Plan by this policy from now on, between two steps, with these ``drafts`` where they
        change. Return the policy and the state that it replaces.
        """
        before = self.policy, self.state
        self.policy, self.state = policy, state
        self._guard, self._guard_samples = guard_in(policy), -1
        if drafts is not None:
            self._decisions = DecisionLog(drafts)
        return before

    def plan(self, view: View, log: StepLog) -> Plan:
        """Return the policy's plan; where it fails, that of no speculation."""
        with log.part("planning"):
            state, now = self.state, self._clock()
            try:
                plan, self.state = self.policy.plan(view, state, now, self._rng)
            except Exception:
                self._report_failure("this step does not speculate")
                plan, _ = NoSpeculation().plan(view, None, self._clock(), self._rng)
        if len(view):
            self.last_plan = (view, state, plan, now)
        self._decisions.note(plan, self._clock(), self.drift)
        return plan

    def needs_ceilings(self, request: IntArray) -> bool:
        """Return whether the next plan, for requests int64[n], may depend on what drafts could
        propose.
        """
        try:
            return self.policy.needs_ceilings(request, self.state)
        except Exception:
            self._report_failure("all drafts are asked")
            return True

    def trim(self, view: View, plan: Plan, drafted: DraftNodes) -> list[int]:
        """Return how many of each row's nodes are verified; where the policy fails, as many as were
        planned.
        """
        try:
            nodes = self.policy.trim(view, plan, drafted, self.state)
            pairs = zip(nodes.tolist(), plan.length, strict=True)  # one number a row, or it fails
            return [most for most, _ in pairs]
        except Exception:
            self._report_failure("the planned number of nodes is verified")
            planned: list[int] = plan.length.tolist()
            return planned

    def observe(self, outcome: Outcome) -> None:
        """Let the policy learn from a step; one that fails starts again."""
        try:
            self.state = self.policy.observe(outcome, self.state, self._clock())
        except Exception:
            self._report_failure("it forgets what it has learnt")
            self.state = self.policy.start()
        self._show_guard()

    def _show_guard(self) -> None:
        """Show what the guard found, where it has compared anything since the last time."""
        if self._guard is None:
            return
        guard, depth = self._guard
        state = within(self.state, depth)
        if state.outer.samples != self._guard_samples:
            self._guard_samples = state.outer.samples
            self.metrics.guard(guard.verdicts(state))

    def verdicts(self) -> list[GuardVerdict]:
        """Return what the guard found (any thread); empty: there is none."""
        if self._guard is None:
            return []
        guard, depth = self._guard
        return guard.verdicts(within(self.state, depth))

    def drift(self) -> dict[str, float]:
        """Return measured over predicted time by part of the step."""
        try:
            return self.policy.drift(self.state)
        except Exception:
            self._report_failure("no drift is shown")
            return {}

    def _report_failure(self, consequence: str) -> None:
        """Count the current exception, and log it at most every ``LOG_PERIOD_S``."""
        self._stats.fallback("policy_error")
        now = self._clock()
        if now >= self._silent_until_s:
            self._silent_until_s = now + LOG_PERIOD_S
            logger.exception("the policy failed; %s", consequence)
