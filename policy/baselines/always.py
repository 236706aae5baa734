"""Policies that always do the same: no speculation, a fixed choice, a random one that tests
exactness.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator as Rng

from policy.plan import IntArray, Plan, Policy, View

from .entry import Baseline, same_for_all


class NoSpeculation(Policy[None]):
    """Plain decoding: k = 0 for everyone."""

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        return Plan.nothing(len(view)), None

    def needs_ceilings(
        self,
        request: IntArray,  # [n]
        state: None,
    ) -> bool:
        return False


class FixedLength(Policy[None]):
    """One draft and one length for everyone, as far as each request's ceiling allows."""

    def __init__(self, draft: str, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.draft, self.length = draft, length

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        return same_for_all(view, self.draft, self.length), None


class RandomChoice(Policy[None]):
    """Any draft and any length, drawn again in every step: no text may depend on it."""

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        if not view.drafts or not len(view):
            return Plan.nothing(len(view)), None
        draft = rng.integers(0, len(view.drafts), len(view))
        ceiling = view.ceiling[np.arange(len(view)), draft]
        return Plan.within(view, draft, rng.integers(0, ceiling + 1)), None


ENTRIES = {
    "none": Baseline(
        lambda s: NoSpeculation(), "no speculation", compared=False, colour="#555555", marker="s"
    ),
    "fixed": Baseline(
        lambda s: FixedLength(s.draft, s.length),
        "fixed choice",
        needs=("draft", "length"),
        compared=False,
        colour="#b9b9b9",
        marker=".",
    ),
    "random": Baseline(lambda s: RandomChoice(), "random choice", compared=False),
}
