"""Planners that do not learn: the arms that an adaptive one is measured against, and the random one that exactness is tested with."""

from __future__ import annotations

import numpy as np

from .plan import NO_DRAFT, IntArray, Outcome, Plan, View


class _Stateless:
    """A planner whose state is nothing."""

    def start(self) -> None:
        """Return the empty state."""
        return

    def observe(self, outcome: Outcome, state: None, now: float) -> None:
        """Learn nothing."""
        del outcome, state, now

    def stand_by(self, view: View, state: None) -> None:
        """Remember nothing."""
        del view, state

    def drift(self, state: None) -> dict[str, float]:
        """Return nothing: no time is predicted."""
        del state
        return {}


class NoSpeculation(_Stateless):
    """Plain decoding: k = 0 for everyone."""

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Choose no draft."""
        del state, now, rng
        return _plan(np.full(len(view), NO_DRAFT), np.zeros(len(view), np.int64)), None


class FixedLength(_Stateless):
    """One draft and one length for everyone, as far as each request's ceiling allows."""

    def __init__(self, draft: str, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.draft = draft
        self.length = length

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Choose the draft. Raises ValueError when the view does not have it."""
        del state, now, rng
        if self.draft not in view.drafts:
            raise ValueError(f"draft must be one of {view.drafts}, got {self.draft!r}")
        column = view.drafts.index(self.draft)
        length = np.where(view.ready, np.minimum(self.length, view.ceiling[:, column]), 0)
        return _plan(np.full(len(view), column), length), None


class RandomChoice(_Stateless):
    """Any draft and any length within the ceilings, drawn anew in every step: no text may depend on it."""

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Draw a plan."""
        del state, now
        if not view.drafts or not len(view):
            return _plan(np.full(len(view), NO_DRAFT), np.zeros(len(view), np.int64)), None
        draft = rng.integers(0, len(view.drafts), len(view))
        ceiling = np.where(view.ready, view.ceiling[np.arange(len(view)), draft], 0)
        return _plan(draft, rng.integers(0, ceiling + 1)), None


def _plan(draft: IntArray, length: IntArray) -> Plan:
    """Return a plan in which k = 0 and no draft are the same thing."""
    return Plan(np.where(length > 0, draft, NO_DRAFT), length)
