"""How long a draft has been right about a request: its evidence where it shows none of its own."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from .evidence import MATCH_EDGES, bin_of_match
from .plan import IntArray

Tokens = TypeVar("Tokens", int, IntArray)


def bin_of_streak(tokens: int) -> int:
    """Return the bin (``policy.evidence``) of a draft that was right about a request's last
    ``tokens`` tokens.
    """
    return min(1 + bin_of_match(tokens), len(MATCH_EDGES))


def bins_of_streaks(tokens: IntArray) -> IntArray:
    """Return the bins of streaks; 0 for those below 0, which are not known."""
    bins: IntArray = _BINS[np.minimum(tokens, MATCH_EDGES[-1])]
    return bins


def streak_after(streak: Tokens, accepted: Tokens, scored: Tokens, emitted: Tokens) -> Tokens:
    """Return a draft's streak on a request after a step in which it proposed: the tokens accepted
    last, and those of the steps before if each was right as far as it went.
    """
    return accepted + (accepted >= scored) * (streak + emitted - accepted)


_BINS = np.array([*map(bin_of_streak, range(MATCH_EDGES[-1] + 1)), 0])  # the last: of -1
