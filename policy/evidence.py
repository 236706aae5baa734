"""Evidence that a draft shows before it proposes, as a small number by which acceptance is learnt
(``policy.plan.View.evidence``).

A bin means whatever its draft measures. The estimator learns what each is worth, so the edges need
only tell apart what differs.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .plan import IntArray

EVIDENCE_BINS = 18
"""Bins of evidence; 0: the draft shows nothing."""

PAST_TRAINED = EVIDENCE_BINS - 1
"""The bin of a draft for texts that are longer than those that it was trained on."""

MATCH_EDGES = (1, 3, 5, 8, 12, 16, 24, 32)
"""The least tokens of a match by its class: as many as end the text and occurred earlier."""


def bin_of_match(tokens: int, agree: bool = False) -> int:
    """Return the bin of a match of ``tokens`` tokens, 0 where nothing matches.

    Each class has two bins: the second is for places that ``agree`` on the next token.
    """
    place = bisect_right(MATCH_EDGES, tokens)
    return 2 * place - 1 + agree if place else 0


def share_evidence(evidence: IntArray) -> IntArray:
    """Return the bins int64[n, d] with which a draft that shows nothing has the highest bin of a
    match of the row's others: a text that repeats itself is easier for every draft.
    """
    matches = np.where(evidence == PAST_TRAINED, 0, evidence)
    return np.where(evidence == 0, matches.max(axis=1, initial=0, keepdims=True), evidence)
