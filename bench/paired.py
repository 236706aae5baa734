"""Statistics of paired runs: two arms see the same block of work, one after the other, and only
their ratio is believed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

RESAMPLES = 10_000


def abba(arms: Sequence[str], block: int) -> list[str]:
    """Return the order of the arms in a block: forwards in even blocks, backwards in odd ones, so
    that drift cancels.
    """
    return list(arms) if block % 2 == 0 else list(reversed(arms))


def median_interval(
    ratios: Sequence[float], seed: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median, resampling blocks (Efron 1979)."""
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]


def repeated_share(text: str, size: int = 4) -> float:
    """Return the share of word n-grams of a text that occurred in it before: near 1 for a text that
    goes round in circles.
    """
    words = text.split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
