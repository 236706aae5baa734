"""Distributions of the next token, made of a row of logits. A row is worked on by itself, so that
its distribution has the same bits in any batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.request import SamplingParams

Floats = npt.NDArray[np.floating[Any]]
"""Logits, or what is made of them: fp64 where the engine computes in it, else fp32."""

FAINT = 0.02
"""A candidate that a draft holds for so much less likely than its best is not worth a node."""

_NUCLEUS_BOUNDS = (1e-3, 1e-5, 0.0)
"""Probabilities: a nucleus is looked for among the tokens above the first, then the next."""

_SCORE_BOUNDS = (-7.0, -12.0, -math.inf)
"""Scores below the greatest, 0: the best tokens are looked for in the same way."""


def target_probs(
    logits: Floats,  # [vocab]
    params: SamplingParams,
) -> Floats:
    """Return the distribution [vocab] that a token is drawn from, of sum one: temperature first,
    then min-p, top-k, top-p (as vLLM does).

    Top-k keeps ties with the k-th token, top-p the one that crosses the threshold, min-p the
    threshold itself.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of logits that are no numbers, too
        scores = logits - logits.max()  # the greatest is 0: no temperature overflows it
        scores /= params.temperature
        if params.min_p:
            scores[scores < math.log(params.min_p)] = -math.inf
        if 0 < params.top_k < len(scores):
            scores[scores < kth_greatest(scores, params.top_k)] = -math.inf
        probs: Floats = np.exp(scores, out=scores)
        probs /= probs.sum()
        if params.top_p < 1.0:
            probs[probs < _least(probs, params.top_p)] = 0.0
            probs /= probs.sum()
    return probs


def kth_greatest(
    scores: Floats,  # [vocab], at most 0
    count: int,
) -> float:
    """Return the ``count``-th greatest score.

    Few are near the greatest, and to sort a whole vocabulary takes 30 times as long.
    """
    for bound in _SCORE_BOUNDS:
        near = scores[~(scores < bound)]
        if len(near) >= count:
            break
    return float(np.partition(near, len(near) - count)[len(near) - count])


def _least(probs: Floats, share: float) -> float:
    """Return the probability at which the greatest of a distribution [vocab] reach a share of
    it.
    """
    for bound in _NUCLEUS_BOUNDS:
        head = probs[~(probs < bound)]
        if head.sum() >= share:
            break
    ordered = np.sort(head)[::-1]
    return float(ordered[min(int(ordered.cumsum().searchsorted(share)), len(ordered) - 1)])


def likeliest(
    logits: Floats,  # [columns]
    most: int,
) -> list[tuple[int, float]]:
    """Return the columns of the greatest logits and their probabilities, best first, the first of
    equals first: at most ``most``, none under ``FAINT`` of the first one's.
    """
    masses = np.exp(logits - logits.max())
    near = np.flatnonzero(masses >= FAINT)
    near = near[np.argsort(-masses[near], kind="stable")[:most]]
    return list(zip(near.tolist(), (masses[near] / masses.sum()).tolist(), strict=True))
