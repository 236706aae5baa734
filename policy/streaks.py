"""How long a draft has been right about a request: its evidence where it shows none of its own."""

from __future__ import annotations

from bisect import bisect_right
from typing import TypeVar

import numpy as np

from .plan import IntArray

STREAK_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
"""The least tokens of a streak in bins 1, 2, ...; bin 0: the draft did not propose last."""

Tokens = TypeVar("Tokens", int, IntArray)


def bin_of_streak(tokens: int) -> int:
    """Return the bin (``policy.evidence``) of a draft that was right about a request's last
    ``tokens`` tokens.
    """
    return bisect_right(STREAK_EDGES, tokens)


def bins_of_streaks(tokens: IntArray) -> IntArray:
    """Return the bins of streaks; 0 for those below 0, which are not known."""
    bins: IntArray = np.searchsorted(STREAK_EDGES, tokens, side="right")
    return bins


def streak_after(streak: Tokens, accepted: Tokens, scored: Tokens, emitted: Tokens) -> Tokens:
    """Return a draft's streak on a request after a step in which it proposed: the tokens accepted
    last, and those of the steps before if each was right as far as it went.
    """
    return accepted + (accepted >= scored) * (streak + emitted - accepted)
