"""Chains as evidence: how many positions of each held and were seen, and the tables in which they are counted."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .plan import FloatArray, IntArray
from .shifts import RECENT_KEEP, abrupt


class Chains(NamedTuple):
    """Chains of which something was seen, int64[m] each.

    ``slot`` of the request (-1: none), draft, positions that held and were seen.
    """

    slot: IntArray
    draft: IntArray
    held: IntArray
    seen: IntArray

    @classmethod
    def of(cls, slot: IntArray, draft: IntArray, accepted: IntArray, scored: IntArray) -> Chains:
        """Return the chains with ``scored`` positions of which the first ``accepted`` held; none behind the first rejection was seen."""
        used = scored.nonzero()[0]
        if len(used) < len(scored):
            slot, draft = slot.take(used), draft.take(used)
            accepted, scored = accepted.take(used), scored.take(used)
        held = np.minimum(accepted, scored)
        return cls(slot, draft, held, np.minimum(held + 1, scored))


@lru_cache(maxsize=8)
def up_to(k_max: int) -> FloatArray:
    """Return the matrix whose row h is 1 at the first h positions, float64[k_max + 1, k_max]."""
    return np.tri(k_max + 1, k_max, -1)


def add(table: FloatArray, places: IntArray, rows: FloatArray, apart: bool) -> None:
    """Add rows [m, columns] to those of a table, in place; ``apart`` says that no place comes twice."""
    if apart:
        table[places] += rows
    else:
        np.add.at(table, places, rows)


def sums_by(places: IntArray, count: int, rows: FloatArray) -> FloatArray:
    """Return the sums [count, columns] of the rows [m, columns] of each place, of a few places."""
    total: FloatArray = (places == np.arange(count)[:, None]).astype(np.float64).dot(rows)
    return total


def follow(recent: FloatArray, places: IntArray, apart: bool, told: FloatArray, accepted: FloatArray, reached: FloatArray) -> None:
    """Follow chains in ``recent`` [places, 3]: what was ``told`` [m, 3] of them (accepted, reached, expected), in place.

    Of a request that changed at once only the recent counts are kept, all at the first position (``accepted``, ``reached`` [places, K]).
    """
    keep: FloatArray | float = RECENT_KEEP
    if not apart:
        unique, which = np.unique(places, return_inverse=True)
        places, told, keep = unique, sums_by(which, len(unique), told), RECENT_KEEP ** np.bincount(which)[:, None]
    now = keep * recent[places] + told
    recent[places] = now
    changed = abrupt(*now.T)
    if changed.any():
        restarted = places[changed]
        for counts, column in ((accepted, 0), (reached, 1)):
            counts[restarted] = 0.0
            counts[restarted, 0] = now[changed, column]
        recent[restarted] = 0.0
