"""What a draft would have had accepted: its pass over tokens that were emitted without it also tells what it would have proposed there."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from backend.engines.coupling import winner
from backend.engines.laws import arg_max, target_laws
from backend.engines.processing import Columns
from backend.engines.verification import Request, scores

SCORED_ROWS = 32
"""Rows of a submission, at most, whose logits are made for this alone."""

RACE_ROWS = 4
"""For how many of them a plan-invariant row counts: its race takes longer than its logits do."""


def guesses(logits: torch.Tensor, request: Request, columns: Columns) -> list[int]:
    """Return the token that a greedy or plan-invariant request takes in each row of ``logits`` [rows, S].

    Row i is that of the place ``request.position + i``, behind ``request.tokens[:i]``: all of those were emitted.
    """
    sampling = request.sampling
    rows = scores(logits, [request], columns) if request.reads_scores else logits
    if sampling.greedy:
        found = arg_max(rows)
    else:
        laws = target_laws(rows, request.row_params)
        found = [winner(law, sampling.seed, request.position + row, columns) for row, law in enumerate(laws)]
    return [columns.token(column) for column in found]


def chains(guessed: Seq[int], emitted: Seq[int], most: int) -> list[tuple[int, int]]:
    """Cut ``emitted`` into the chains that a draft of these guesses would have made of it; return (accepted, length) of each.

    A chain has ``most`` tokens, or those that are left. The token behind what is accepted of it is the target's own, and no guess.
    """
    found, at = [], 0
    while at < len(emitted):
        length = min(most, len(emitted) - at)
        accepted = next((j for j in range(length) if guessed[at + j] != emitted[at + j]), length)
        found.append((accepted, length))
        at += accepted + 1
    return found
