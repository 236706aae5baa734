"""What operators switch while the service runs: speculation on, off or in the shadow, a canary's share, a cap on the step's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from .baselines import FixedLength, NoSpeculation
from .plan import Drafted, IntArray, Outcome, Plan, Policy, View


@dataclass(frozen=True, slots=True)
class Switches:
    """One setting of the switches; a change is another value.

    ``speculation``: ``on`` (the planner's choice is applied), ``off`` (none is, k = 0) or ``shadow`` (the planner's choice is recorded, the
    fixed one applied). ``canary_share`` of the requests follow the planner, the others the fixed choice ``fixed_draft``, ``fixed_length``
    (0: no speculation). ``inter_token_cap_s`` is the longest step that the planner may choose, unless one without speculation takes longer
    anyway; 0: no cap.
    """

    speculation: str = "on"
    canary_share: float = 1.0
    fixed_draft: str = ""
    fixed_length: int = 0
    inter_token_cap_s: float = 0.0

    def arm(self, control: bool) -> str:
        """Return whose choice a request gets: of two arms ``planner`` or ``fixed``, or the mode where there are none."""
        if self.speculation != "on":
            return self.speculation
        return "fixed" if control else "planner"

    def in_control(self, request: int) -> bool:
        """Return whether a new request takes the fixed choice: by a hash of its id, so in any order of arrivals."""
        share = int.from_bytes(blake2b(str(request).encode(), digest_size=8).digest(), "big") / 2**64
        return share >= self.canary_share


class SwitchedState(NamedTuple):
    """The planner's state, and by request the draft that it would have used in the last step, had it been let."""

    inner: Any
    shadowed: dict[int, int]


class SwitchedPolicy:
    """A policy under switches, which are read anew before every step."""

    def __init__(self, policy: Policy, switches: Callable[[], Switches]) -> None:
        self.policy = policy
        self._switches = switches

    def start(self) -> SwitchedState:
        """Return the state before the first step."""
        return SwitchedState(self.policy.start(), {})

    def plan(self, view: View, state: SwitchedState, now: float, rng: np.random.Generator) -> tuple[Plan, SwitchedState]:
        """Plan as the switches say. Raises ValueError when the fixed draft is not in the view."""
        switches = self._switches()
        if switches.speculation == "off":
            return NoSpeculation().plan(view, None, now, rng)[0], self.stand_by(view, state)
        if switches.inter_token_cap_s > 0:
            view = replace(view, cap_s=switches.inter_token_cap_s)
        if switches.speculation == "shadow":
            return self._shadow(view, state, now, rng, _fixed(switches, view, now, rng))
        if view.control is None or not view.control.any():
            plan, inner = self.policy.plan(view, state.inner, now, rng)
            return plan, SwitchedState(inner, {})
        given = _fixed(switches, view, now, rng)
        plan, inner = self.policy.plan(replace(view, given=given), state.inner, now, rng)
        draft, length = (np.where(view.control, theirs, own) for theirs, own in ((given.draft, plan.draft), (given.length, plan.length)))
        return replace(plan, draft=draft, length=length), SwitchedState(inner, {})

    def needs_offers(self, request: IntArray, state: SwitchedState) -> bool:
        """Return the policy's answer where it alone decides; where nothing is to speculate, nothing is to be asked."""
        switches = self._switches()
        if switches.speculation == "off":
            return False
        alone = switches.speculation == "on" and switches.canary_share == 1
        return not alone or self.policy.needs_offers(request, state.inner)

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: SwitchedState) -> IntArray:
        """Return the policy's answer; rows that it did not plan are verified as planned."""
        switches = self._switches()
        if switches.speculation != "on":
            return plan.length
        if switches.inter_token_cap_s > 0:
            view = replace(view, cap_s=switches.inter_token_cap_s)
        nodes = self.policy.trim(view, plan, drafted, state.inner)
        return nodes if view.control is None else np.where(view.control, plan.length, nodes)

    def observe(self, outcome: Outcome, state: SwitchedState, now: float) -> SwitchedState:
        """Let the policy learn, whoever planned."""
        return state._replace(inner=self.policy.observe(outcome, state.inner, now))

    def stand_by(self, view: View, state: SwitchedState) -> SwitchedState:
        """Return the state before a step that the policy does not plan."""
        return SwitchedState(self.policy.stand_by(view, state.inner), {})

    def save(self, state: SwitchedState, now: float) -> dict[str, Any]:
        """Return the policy's."""
        return self.policy.save(state.inner, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> SwitchedState:
        """Return the state of what the policy has saved. Raises ValueError for data that do not fit."""
        return SwitchedState(self.policy.load(data, now, idle_s), {})

    def drift(self, state: SwitchedState) -> dict[str, float]:
        """Return the policy's."""
        return self.policy.drift(state.inner)

    def _shadow(self, view: View, state: SwitchedState, now: float, rng: np.random.Generator, applied: Plan) -> tuple[Plan, SwitchedState]:
        """Return the applied plan with what the policy would have done in its shadow.

        A draft that it would have used in the last step would not have to catch up now.
        """
        catchup = view.catchup.copy()
        for row, request in enumerate(view.request.tolist()):
            if (draft := state.shadowed.get(request)) is not None:
                catchup[row, draft] = min(1, catchup[row, draft])
        shadow, inner = self.policy.plan(replace(view, catchup=catchup), state.inner, now, rng)
        used = np.flatnonzero(shadow.length)
        shadowed = dict(zip(view.request[used].tolist(), shadow.draft[used].tolist(), strict=True))
        return replace(applied, shadow=shadow), SwitchedState(self.policy.stand_by(view, inner), shadowed)


def _fixed(switches: Switches, view: View, now: float, rng: np.random.Generator) -> Plan:
    """Return the fixed choice for every row."""
    policy = FixedLength(switches.fixed_draft, switches.fixed_length) if switches.fixed_length else NoSpeculation()
    return policy.plan(view, None, now, rng)[0]
