"""Plans that are kept for some steps, and which of them is for a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from .plan import NO_DRAFT, IntArray, Plan, View

MANY = 4
"""Rows of which no single one makes the whole batch gain or lose much."""
_FEW_STEPS, _MANY_STEPS = 16, 32  # that a choice is kept at most


def most_steps(rows: int) -> int:
    """Return for how many steps a choice for so many rows is kept at most."""
    return _MANY_STEPS if rows >= MANY else _FEW_STEPS


@dataclass(frozen=True, slots=True)
class Kept:
    """Plans that are kept while planning would take more than its share of the time.

    Of a few requests one for each set of drafts that had something to propose: a match that lookup
    has just found may be half of a step's tokens. Many requests have one, whoever comes and goes,
    while they are more than half and less than twice the ``rows`` that it was made for: who has
    come, or has other drafts with something to propose than at the time, takes the usual choice of
    those that had the same. ``request`` are theirs, as bytes, ``found`` the drafts of each, in
    bits; ``prefill_s`` of what the plans predict was the time of prefill.
    """

    request: bytes
    rows: int
    plans: Mapping[bytes, Plan]
    found: bytes
    prefill_s: float = 0.0

    @staticmethod
    def drafts_found(view: View) -> IntArray:
        """Return which drafts have something to propose for each row, in bits, int64[n]."""
        bits: IntArray = (view.ceiling > 0) @ (1 << np.arange(len(view.drafts)))
        return bits

    @staticmethod
    def key(view: View) -> bytes:
        """Return which of the plans is for a view."""
        return (view.ceiling > 0).tobytes() if len(view) < MANY else b""

    def plan(self, view: View) -> Plan | None:
        """Return the plan for a view, cut to its ceilings, None where one is to be made."""
        request, n = view.request.tobytes(), len(view)
        if view.control_plan is not None:
            return None
        if (plan := self.plans.get(self.key(view))) is None:
            return None
        speculates = plan.length.any()
        if speculates and (view.cap_s < math.inf or (view.prefill_tokens and n < MANY)):
            return None
        if request != self.request and not self.lasts(n):
            return None
        found = self.drafts_found(view)
        if request != self.request or (n >= MANY and found.tobytes() != self.found):
            plan = self._handed_on(plan, view, found)
        again = replace(plan, notes={"kept": True}, predicted_s=plan.predicted_s - self.prefill_s)
        if speculates:
            ceiling = view.ceiling.ravel().take(np.arange(n) * len(view.drafts) + plan.draft)
            again.length = np.minimum(plan.length, np.minimum(ceiling, view.remaining - 1))
            again.draft = np.where(again.length > 0, plan.draft, NO_DRAFT)
        return again

    def lasts(self, rows: int) -> bool:
        """Return whether it holds for so many rows, others among them."""
        return max(MANY - 1, self.rows // 2) < rows < 2 * self.rows

    def _handed_on(self, plan: Plan, view: View, found: IntArray) -> Plan:
        rows = range(len(plan.length))
        choices = list(zip(plan.draft.tolist(), plan.length.tolist(), strict=True))
        before = np.frombuffer(self.found, np.int64).tolist()
        requests = np.frombuffer(self.request, np.int64).tolist()
        own = {key: row for row, key in enumerate(zip(requests, before, strict=True))}

        def usual(rows: Iterable[int]) -> int:
            chosen = Counter(choices[row] for row in rows)
            return choices.index(max(chosen, key=lambda choice: (chosen[choice], choice)))

        of = {bits: usual(row for row in rows if before[row] == bits) for bits in set(before)}
        other = usual(rows)
        keys = zip(view.request.tolist(), found.tolist(), strict=True)
        return plan.of_rows(np.array([own.get(key, of.get(key[1], other)) for key in keys]))
