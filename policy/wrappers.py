"""Policies around a policy, and the operators' switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic

import numpy as np
from numpy.random import Generator as Rng

from .baselines import same_for_all
from .plan import DraftNodes, IntArray, Outcome, Plan, Policy, State, View


@dataclass(slots=True)
class WrapperState(Generic[State]):
    """A wrapper's state."""

    inner: State
    """That of the policy within."""
    outer: Any = None
    """The wrapper's own state; None: nothing."""


class Wrapper(Policy[WrapperState[State]]):
    """A policy around another, which answers wherever a wrapper overrides nothing."""

    def __init__(self, policy: Policy[State]) -> None:
        self.policy = policy

    def start(self) -> WrapperState[State]:
        return WrapperState(self.policy.start())

    def plan(
        self, view: View, state: WrapperState[State], now: float, rng: Rng
    ) -> tuple[Plan, WrapperState[State]]:
        plan, inner = self.policy.plan(view, state.inner, now, rng)
        return plan, WrapperState(inner)

    def needs_ceilings(
        self,
        request: IntArray,  # [n]
        state: WrapperState[State],
    ) -> bool:
        return self.policy.needs_ceilings(request, state.inner)

    def trim(
        self, view: View, plan: Plan, drafted: DraftNodes, state: WrapperState[State]
    ) -> IntArray:
        return self.policy.trim(view, plan, drafted, state.inner)

    def observe(
        self, outcome: Outcome, state: WrapperState[State], now: float
    ) -> WrapperState[State]:
        inner = self.policy.observe(outcome, state.inner, now)
        return WrapperState(inner, state.outer)

    def save(self, state: WrapperState[State], now: float) -> dict[str, Any]:
        return self.policy.save(state.inner, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> WrapperState[State]:
        return WrapperState(self.policy.load(data, now, idle_s))

    def drift(self, state: WrapperState[State]) -> dict[str, float]:
        return self.policy.drift(state.inner)


def within(state: Any, depth: int) -> Any:
    """Return the state inside this many wrappers."""
    for _ in range(depth):
        state = state.inner
    return state


@dataclass(frozen=True, slots=True)
class Switches:
    """One setting of the operators' switches; a change is another value."""

    speculation: str = "on"
    """``on`` (the planner's choice is applied), ``off`` (k = 0) or ``shadow`` (the planner's choice
    is recorded, the fixed one applied).
    """
    canary_share: float = 1.0
    """The share of requests that follow the planner; the others get the fixed choice."""
    fixed_draft: str = ""
    fixed_length: int = 0
    """0: no speculation."""
    inter_token_cap_s: float = 0.0
    """The longest step that the planner may choose, unless one without speculation takes longer;
    0: no cap.
    """

    def arm(self, control: bool) -> str:
        """Return the choice that a request gets: ``planner``, ``fixed``, or the mode if not on."""
        if self.speculation != "on":
            return self.speculation
        return "fixed" if control else "planner"

    def in_control(self, request: int) -> bool:
        """Return whether a new request takes the fixed choice, by a hash of its id."""
        digest = blake2b(str(request).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 >= self.canary_share

    def fixed_plan(self, view: View) -> Plan:
        """Return the fixed choice for all rows. Raises ValueError for a draft not in the view."""
        if not self.fixed_length:
            return Plan.nothing(len(view))
        return same_for_all(view, self.fixed_draft, self.fixed_length)

    def cap(self, view: View) -> View:
        """Return the view with the cap on the step's time."""
        cap_s = self.inter_token_cap_s
        return replace(view, cap_s=cap_s) if cap_s > 0 else view


class SwitchedPolicy(Wrapper[State]):
    """A policy under switches, which are read again before every step.

    It remembers, by request, the draft that the shadow used in the last step.
    """

    def __init__(self, policy: Policy[State], switches: Callable[[], Switches]) -> None:
        super().__init__(policy)
        self._switches = switches

    def plan(
        self, view: View, state: WrapperState[State], now: float, rng: Rng
    ) -> tuple[Plan, WrapperState[State]]:
        """Plan as the switches say. Raises ValueError when the fixed draft is not in the view."""
        switches = self._switches()
        if switches.speculation == "off":
            return Plan.nothing(len(view)), WrapperState(state.inner)
        view = switches.cap(view)
        if switches.speculation == "shadow":
            shadow_view = _with_shadow(view, state.outer or {})
            shadow, inner = self.policy.plan(shadow_view, state.inner, now, rng)
            drafting = np.flatnonzero(shadow.length)
            drafts = zip(
                view.request[drafting].tolist(), shadow.draft[drafting].tolist(), strict=True
            )
            return replace(switches.fixed_plan(view), shadow=shadow), WrapperState(
                inner, dict(drafts)
            )
        if view.control is None or not view.control.any():
            return super().plan(view, state, now, rng)
        fixed = switches.fixed_plan(view)
        plan, after = super().plan(replace(view, control_plan=fixed), state, now, rng)
        draft = np.where(view.control, fixed.draft, plan.draft)
        length = np.where(view.control, fixed.length, plan.length)
        return replace(plan, draft=draft, length=length), after

    def needs_ceilings(self, request: IntArray, state: WrapperState[State]) -> bool:
        """Return the policy's answer for requests int64[n] if it alone decides; False if
        speculation is off.
        """
        switches = self._switches()
        if switches.speculation == "off":
            return False
        alone = switches.speculation == "on" and switches.canary_share == 1
        return not alone or super().needs_ceilings(request, state)

    def trim(
        self, view: View, plan: Plan, drafted: DraftNodes, state: WrapperState[State]
    ) -> IntArray:
        """Return the policy's answer; rows that it did not plan are verified as planned."""
        switches = self._switches()
        if switches.speculation != "on":
            return plan.length
        nodes = super().trim(switches.cap(view), plan, drafted, state)
        return nodes if view.control is None else np.where(view.control, plan.length, nodes)


def _with_shadow(view: View, shadowed: dict[int, int]) -> View:
    """Return the view in which drafts that the shadow used have at most one token to read. Its
    ``request`` is a copy: no step is executed as the policy plans for it.
    """
    catchup, request_copy = view.catchup.copy(), view.request.copy()
    for row, request in enumerate(view.request.tolist()):
        if (draft := shadowed.get(request)) is not None:
            catchup[row, draft] = min(1, catchup[row, draft])
    return replace(view, catchup=catchup, request=request_copy)
