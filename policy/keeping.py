"""A choice kept for some steps: where planning takes more of their time than it may, or where a large batch gains nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from .plan import NO_DRAFT, FloatArray, IntArray, Plan, View

MOST_STEPS = 16
MOST_STEPS_OF_MANY = 32
_MANY = 4  # rows of which no single one can make the whole batch gain or lose much
_RATE = 0.1  # of a new step in the average of what planning takes


@dataclass(frozen=True, slots=True)
class OfFew:
    """Plans for a few ``requests`` (as bytes, which compare quickest), and for how many ``steps`` more they hold.

    They hold while these requests stay and no prompt joins them. Each is for what the drafts had to propose (``_offers``) when it was made,
    for a match that lookup has just found may be half of a step's tokens; matches come and go, and so do plans.
    """

    plans: Mapping[bytes, Plan]
    steps: int
    requests: bytes

    def next_step(self, view: View) -> tuple[Plan, Kept] | None:
        """Return the plan for the next step, its chains cut to their ceilings, and what is left; None where planning is due."""
        if not self.holds_for(view) or not (again := self.plans.get(_offers(view))):
            return None
        plan = _cut(again, view)
        return None if plan is None else (plan, replace(self, steps=self.steps - 1))

    def holds_for(self, view: View) -> bool:
        """Return whether there is nothing new but what the drafts find."""
        return bool(self.steps) and view.request.tobytes() == self.requests and not view.prefill_tokens and _is_whole(view)


@dataclass(frozen=True, slots=True)
class OfMany:
    """A plan for many ``requests`` (as bytes), and for how many ``steps`` more it holds.

    It holds whatever the drafts find and whoever comes and goes, while these are more than half and less than twice the ``rows`` that it
    was made for: planning anew for each newcomer takes more of their time than the newcomer can gain until they are planned for.
    ``accepted`` float64[K + 1, n] are the tokens that a row's draft is expected to have accepted in chains of so many: where some can no
    longer be had, what is left is to be judged anew. Without rows where the plan does not speculate.
    """

    plan: Plan
    steps: int
    requests: bytes
    rows: int
    accepted: FloatArray

    def next_step(self, view: View) -> tuple[Plan, Kept] | None:
        """Return the plan for the next step, its chains cut to their ceilings, and what is left; None where planning is due."""
        if not self.steps or not _is_whole(view) or not self._lasts(len(view)):
            return None
        again = replace(self, steps=self.steps - 1) if view.request.tobytes() == self.requests else self._taken_over(view)
        if again is None or (plan := _cut(again.plan, view)) is None:
            return None
        if plan.length.any():
            plan = replace(plan, predicted_tokens=len(view) + float(again.accepted[plan.length, np.arange(len(view))].sum()))
        return plan, again

    def rests_for(self, request: IntArray) -> bool:
        """Return whether requests of these ids, all ready, do not speculate in the next step, whatever the drafts find."""
        return self.steps > 0 and self._lasts(len(request)) and not self.plan.length.any()

    def _lasts(self, rows: int) -> bool:
        return max(_MANY - 1, self.rows // 2) < rows < 2 * self.rows

    def _taken_over(self, view: View) -> OfMany | None:
        """Return the same for the rows of a view: a newcomer takes the choice that most have, if its draft takes any number."""
        place = {request: row for row, request in enumerate(np.frombuffer(self.requests, np.int64).tolist())}
        requests, speculates = view.request.tolist(), self.plan.length.any()
        choices = list(zip(self.plan.draft.tolist(), self.plan.length.tolist(), strict=True))
        usual = choices.index(max(choices, key=lambda choice: (choices.count(choice), choice)))
        rows = np.array([place.get(request, usual) for request in requests])
        accepted = self.accepted[:, rows] if speculates else self.accepted
        return OfMany(self.plan.of_rows(rows), self.steps - 1, view.request.tobytes(), self.rows, accepted)


Kept = OfFew | OfMany


def kept(
    plan: Plan,
    view: View,
    accepted: FloatArray,
    planning_s: float,
    share: float,
    rest_steps: int,
    before: Kept | None = None,
    *,
    chains: bool = True,
) -> Kept | None:
    """Return the plan as kept for so many steps that planning, which takes ``planning_s``, has its ``share`` of their time; None for none.

    ``accepted`` as in ``OfMany``. A large batch that gains nothing by speculating is not planned for in ``rest_steps`` steps at the least.
    What is kept from ``before`` for other offers of the drafts stays. ``chains``: plans that speculate are kept too.
    """
    speculates, many = bool(plan.length.any()), len(view) >= _MANY
    rests = many and not speculates
    if not plan.predicted_s > 0 or not _is_whole(view) or not (chains or rests):
        return None
    if view.prefill_tokens and not rests:  # whose time has another shape: tokens beside a prompt cost little
        return None
    steps = min(int(planning_s / (share * plan.predicted_s)), MOST_STEPS_OF_MANY if many else MOST_STEPS)
    steps = max(steps, rest_steps if rests else 0)
    if not steps or (speculates and plan.run is not None):
        return None
    again, requests = replace(plan, notes={"kept": steps, "why_not": plan.notes.get("why_not", {})}), view.request.tobytes()
    if many:
        return OfMany(again, steps, requests, len(view), accepted)
    others = before.plans if isinstance(before, OfFew) and before.holds_for(view) else {}
    return OfFew({**others, _offers(view): again}, steps, requests)


def averaged(average_s: float, planning_s: float) -> float:
    """Return the average of what planning takes after a step in which it took ``planning_s``.

    It begins at 0: first choices, made of hardly any evidence, are not kept for long.
    """
    return average_s + _RATE * (planning_s - average_s)


def _cut(plan: Plan, view: View) -> Plan | None:
    """Return the plan with its chains cut to what can be proposed now, None where a step's time is capped."""
    if not plan.length.any():
        return plan
    length = np.minimum(plan.length, np.minimum(view.ceiling[np.arange(len(view)), plan.draft], view.remaining - 1))
    if view.cap_s < math.inf:
        return None
    if length.tobytes() == plan.length.tobytes():
        return plan
    return replace(plan, draft=np.where(length > 0, plan.draft, NO_DRAFT), length=length)


def _offers(view: View) -> bytes:
    offers: bytes = (view.ceiling > 0).tobytes()
    return offers


def _is_whole(view: View) -> bool:
    """Return whether all rows are the planner's own and ready."""
    return view.given is None and view.flying is None and bool(view.ready.all())
