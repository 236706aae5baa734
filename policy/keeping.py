"""A choice kept for some steps: where planning takes more of their time than it may, or where a large batch gains nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .plan import NO_DRAFT, Plan, View

MOST_STEPS = 8
_REST_ROWS = 4
_RATE = 0.1  # of a new step in the average of what planning takes


@dataclass(frozen=True, slots=True)
class Kept:
    """A plan, and for how many steps more it holds."""

    plan: Plan
    steps: int

    def plan_for(self, view: View, before: View) -> Plan | None:
        """Return the plan for the step after ``before``, its chains cut to their ceilings.

        None where planning is due: after so many steps, when requests come or go, and when a draft begins or ceases to have anything for a
        row, for a match that lookup has just found may be half of a step's tokens.
        """
        if not self.steps or not _is_plain(view) or not np.array_equal(view.request, before.request):
            return None
        if not np.array_equal(view.ceiling > 0, before.ceiling > 0):
            return None
        draft, rows = self.plan.draft, np.arange(len(view))
        length = np.minimum(self.plan.length, np.minimum(view.ceiling[rows, draft], view.remaining - 1))
        if view.headroom is not None and np.add.reduce(length) > view.headroom:
            return None
        notes = {"kept": self.steps, "why_not": self.plan.notes.get("why_not", {})}
        return Plan(
            np.where(length > 0, draft, NO_DRAFT), length, self.plan.predicted_s, self.plan.predicted_tokens, self.plan.price, notes
        )

    def after_a_step(self) -> Kept:
        """Return what is left of it."""
        return Kept(self.plan, self.steps - 1)


def kept(plan: Plan, view: View, planning_s: float, share: float) -> Kept | None:
    """Return the plan as kept for so many steps that planning, which takes ``planning_s``, has its ``share`` of their time; None for none.

    A plan that tries something out is not kept: it was paid for once.
    """
    if not plan.predicted_s > 0 or plan.notes.get("probe") or plan.run is not None or not _is_plain(view):
        return None
    steps = min(int(planning_s / (share * plan.predicted_s)), MOST_STEPS)
    return Kept(plan, steps) if steps else None


def averaged(average_s: float, planning_s: float) -> float:
    """Return the average of what planning takes after a step in which it took ``planning_s``."""
    return average_s + _RATE * (planning_s - average_s) if average_s else planning_s


def same_batch(view: View, before: View | None) -> bool:
    """Return whether the same requests go on, all ready and without prefill beside them.

    A small batch never counts as the same: a match that lookup has just found may be half of its tokens.
    Nor does one of two arms, whose given rows may speculate.
    """
    if before is None or len(view) < _REST_ROWS or view.given is not None:
        return False
    if view.prefill_tokens or len(view) != len(before) or not view.ready.all():
        return False
    return np.array_equal(np.sort(view.request), np.sort(before.request))  # in whatever order


def _is_plain(view: View) -> bool:
    """Return whether all rows are ready and nothing else is in the step or asked of it."""
    return bool(view.given is None and view.flying is None and not view.prefill_tokens and view.cap_s == math.inf and view.ready.all())
