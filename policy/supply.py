"""Counts of the nodes that drafts on the target's device show (``policy.loops.device``)."""

from __future__ import annotations

import numpy as np

from .loops import device as loops
from .loops.device import Supply
from .loops.trim import BINS, KINDS, ProposedNodes
from .plan import IntArray
from .tenants import with_rows


def no_supply(drafts: int, places: int) -> Supply:
    """Return what is known before any proposal."""
    shape = drafts, 2, KINDS, places
    return Supply(np.zeros((*shape, BINS)), np.zeros(shape))


def with_tenants(supply: Supply, before: int, tenants: int, emptied: list[int]) -> Supply:
    """Return the supply of ``before`` tenants for ``tenants``; nothing is known of ``emptied``
    rows.
    """
    return Supply(*(with_rows(column, before, tenants, emptied) for column in supply))


def learnt(supply: Supply, proposed: ProposedNodes, places: IntArray) -> Supply:
    """Return the supply after the nodes of a step; ``places[m]`` by row are how many each was to
    propose for, 0: unknown (``policy.loops.device.learn_supply``).
    """
    after = Supply(*(column.copy() for column in supply))
    loops.learn_supply(after, proposed, places)
    return after
