"""How long a draft has been right about a request: its evidence where it shows none of its own."""

from __future__ import annotations

from .evidence import MATCH_EDGES, bin_of_match


def bin_of_streak(tokens: int) -> int:
    """Return the bin (``policy.evidence``) of a draft that was right about a request's last
    ``tokens`` tokens.
    """
    return min(1 + bin_of_match(tokens), len(MATCH_EDGES))


def streak_after(streak: int, accepted: int, scored: int, emitted: int) -> int:
    """Return a draft's streak on a request after a step in which it proposed: the tokens accepted
    last, and those of the steps before if each was right as far as it went.
    """
    return streak + emitted if accepted >= scored else accepted
