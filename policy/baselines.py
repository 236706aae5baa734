"""Planners that do not learn: the arms that an adaptive one is measured against, and the random one that exactness is tested with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .plan import NO_DRAFT, IntArray, Plan, Policy, View


class NoSpeculation(Policy):
    """Plain decoding: k = 0 for everyone."""

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Choose no draft."""
        del state, now, rng
        return Plan(np.full(len(view), NO_DRAFT), np.zeros(len(view), np.int64)), None

    def needs_offers(self, request: IntArray, state: None) -> bool:
        """Return False."""
        del request, state
        return False


class FixedLength(Policy):
    """One draft and one length for everyone, as far as each request's ceiling allows."""

    def __init__(self, draft: str, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.draft = draft
        self.length = length

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Choose the draft. Raises ValueError when the view does not have it."""
        del state, now, rng
        return same_for_all(view, self.draft, self.length), None


class BatchSchedule(Policy):
    """One draft, its length by the number of requests that decode: TensorRT-LLM's ``draft_len_schedule``, vLLM's table per batch size.

    ``lengths`` maps the largest batch of each range to its k; a batch beyond the last range does not speculate.
    """

    def __init__(self, draft: str, lengths: Mapping[int, int]) -> None:
        if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
            raise ValueError(f"lengths must map batch sizes >= 1 to lengths >= 0, got {dict(lengths)}")
        self.draft = draft
        self.lengths = dict(sorted(lengths.items()))

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Look the batch size up. Raises ValueError when the view does not have the draft."""
        del state, now, rng
        batch = view.decoding
        return same_for_all(view, self.draft, next((k for largest, k in self.lengths.items() if batch <= largest), 0)), None


class RandomChoice(Policy):
    """Any draft and any length within the ceilings, drawn anew in every step: no text may depend on it."""

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Draw a plan."""
        del state, now
        if not view.drafts or not len(view):
            return Plan.within(view, NO_DRAFT, 0), None
        draft = rng.integers(0, len(view.drafts), len(view))
        ceiling = np.where(view.ready, view.ceiling[np.arange(len(view)), draft], 0)
        return Plan.within(view, draft, rng.integers(0, ceiling + 1)), None


def same_for_all(view: View, draft: str, length: int | IntArray) -> Plan:
    """Return the plan of one draft for all ready rows, of ``length`` (one or int64[n]) as far as each row's ceiling allows.

    Raises ValueError when the view does not have the draft.
    """
    if draft not in view.drafts:
        raise ValueError(f"draft must be one of {view.drafts}, got {draft!r}")
    return Plan.within(view, view.drafts.index(draft), length)
