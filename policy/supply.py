"""Counts of the nodes that drafts on the target's device show (``policy.loops.device``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .loops import device as loops
from .loops.trim import BINS, KINDS, Proposed
from .plan import FloatArray, IntArray
from .tenants import with_rows


@dataclass(frozen=True, slots=True, eq=False)
class Supply:
    """The nodes that proposals show, counted by confidence (``policy.loops.device.Supply``)."""

    shown: FloatArray
    proposals: FloatArray

    @classmethod
    def none(cls, drafts: int, places: int) -> Supply:
        """Return what is known before any proposal."""
        shape = drafts, 2, KINDS, places
        return cls(np.zeros((*shape, BINS)), np.zeros(shape))

    @property
    def counts(self) -> loops.Supply:
        """Return the same as the loops take it."""
        return loops.Supply(self.shown, self.proposals)

    def with_tenants(self, before: int, tenants: int, emptied: list[int]) -> Supply:
        """Return the supply of ``before`` tenants for ``tenants``; nothing is known of ``emptied``
        rows.
        """
        columns = self.shown, self.proposals
        return Supply(*(with_rows(column, before, tenants, emptied) for column in columns))

    def learnt(self, proposed: Proposed, places: IntArray) -> Supply:
        """Return the supply after the nodes of a step; ``places`` by row are how many each was to
        propose for, 0: unknown (``policy.loops.device.learn_supply``).
        """
        after = Supply(self.shown.copy(), self.proposals.copy())
        loops.learn_supply(after.counts, proposed, places)
        return after
