"""A choice kept for some steps: where planning takes more of their time than it may, or where a large batch gains nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .plan import NO_DRAFT, Plan, View

MOST_STEPS = 8
_LARGE = 4  # rows of which no single one can make the whole batch gain
_RATE = 0.1  # of a new step in the average of what planning takes


@dataclass(frozen=True, slots=True)
class Kept:
    """A plan, and for how many steps more it holds.

    It is for these ``requests`` and while the same drafts have something to propose for each of them (``offers``; None: whatever they
    have). Both are as bytes, which compare quickest.
    """

    plan: Plan
    steps: int
    requests: bytes
    offers: bytes | None

    def plan_for(self, view: View) -> Plan | None:
        """Return the plan for the next step, its chains cut to their ceilings.

        None where planning is due: after so many steps, when requests come or go, and when a draft begins or ceases to have anything for a
        row, for a match that lookup has just found may be half of a step's tokens.
        """
        if not self.steps or view.request.tobytes() != self.requests or not _is_plain(view):
            return None
        if self.offers is None:
            return self.plan
        if view.cap_s < math.inf or _offers(view) != self.offers:
            return None
        return self._within(view)

    def _within(self, view: View) -> Plan | None:
        """Return the plan with its chains cut, None where they are too many tokens for the KV that is left."""
        plan = self.plan
        length = np.minimum(plan.length, np.minimum(view.ceiling[np.arange(len(view)), plan.draft], view.remaining - 1))
        if view.headroom is not None and np.add.reduce(length) > view.headroom:
            return None
        if length.tobytes() == plan.length.tobytes():
            return plan
        return replace(plan, draft=np.where(length > 0, plan.draft, NO_DRAFT), length=length)

    def after_a_step(self) -> Kept:
        """Return what is left of it."""
        return Kept(self.plan, self.steps - 1, self.requests, self.offers)


def kept(plan: Plan, view: View, planning_s: float, share: float, rest_steps: int, *, chains: bool = True) -> Kept | None:
    """Return the plan as kept for so many steps that planning, which takes ``planning_s``, has its ``share`` of their time; None for none.

    A large batch that gains nothing by speculating is not planned for in ``rest_steps`` steps at the least, whatever its drafts find
    meanwhile. ``chains``: plans that speculate are kept too. One that tries something out is not: it was paid for once.
    """
    speculates = bool(plan.length.any())
    rests = not speculates and len(view) >= _LARGE
    if not plan.predicted_s > 0 or plan.notes.get("probe") or not _is_plain(view) or not (chains or rests):
        return None
    steps = max(min(int(planning_s / (share * plan.predicted_s)), MOST_STEPS), rest_steps if rests else 0)
    if not steps or (speculates and plan.run is not None):
        return None
    offers = None if rests else _offers(view)
    again = replace(plan, notes={"kept": steps, "why_not": plan.notes.get("why_not", {})})
    return Kept(again, steps, view.request.tobytes(), offers)


def averaged(average_s: float, planning_s: float) -> float:
    """Return the average of what planning takes after a step in which it took ``planning_s``."""
    return average_s + _RATE * (planning_s - average_s) if average_s else planning_s


def _offers(view: View) -> bytes:
    offers: bytes = (view.ceiling > 0).tobytes()
    return offers


def _is_plain(view: View) -> bool:
    """Return whether all rows are ready and nothing else is in the step."""
    return view.given is None and view.flying is None and not view.prefill_tokens and bool(view.ready.all())
