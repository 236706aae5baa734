"""The tokens a draft would have had accepted: its pass over tokens that were emitted without it
also tells what it would have proposed there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from backend.sampling.distributions import Floats
from backend.sampling.processing import Columns
from backend.sampling.verification import VerifyRequest, candidates

SCORED_ROWS = 32
"""Rows of a submission, at most, whose logits are made for this alone."""

DRAWN_ROWS = 4
"""For how many of them a row of a sampled text counts: its race takes longer than its logits do."""


def guesses(
    logits: Floats,  # [rows, columns]
    first: VerifyRequest,
    columns: Columns,
) -> list[int]:
    """Return the token that a draft of these logits would have proposed in each row's place.

    Row i is that of the place ``first.position + i`` of ``first.committed``, all emitted.
    """
    places = [replace(first, position=first.position + row) for row in range(len(logits))]
    rows = candidates(logits, places, 1, columns)
    return [columns.token(row[0][0]) if row else -1 for row in rows]


def chains(guessed: Seq[int], emitted: Seq[int], most: int) -> list[tuple[int, int]]:
    """Cut ``emitted`` into the chains that a draft of these guesses would have made of it; return
    (accepted, length) of each.

    A chain has ``most`` tokens, or those that are left. The token after what is accepted of it is
    the target's own, and no guess.
    """
    results, at = [], 0
    while at < len(emitted):
        length = min(most, len(emitted) - at)
        accepted = next((j for j in range(length) if guessed[at + j] != emitted[at + j]), length)
        results.append((accepted, length))
        at += accepted + 1
    return results
