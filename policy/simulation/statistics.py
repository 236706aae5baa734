"""Paired comparisons of arms that served the same requests: simulated with the same random numbers,
or measured one after the other in blocks, whose ratios alone are believed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from policy.plan import FloatArray

BLOCK_REQUESTS = 20
_RESAMPLES = 2000
_MEDIAN_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two arms' means with its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_of_means(arm: list[FloatArray], other: list[FloatArray], seed: int = 0) -> Ratio:
    """Return mean(arm) / mean(other) over runs, float64[requests] each, of the same requests in
    order of arrival.

    The interval is a percentile bootstrap over blocks of 20 neighbouring requests (neighbours queue
    together, so they are one draw), the same blocks for both arms.
    """
    sums = np.array([_block_sums(runs) for runs in (arm, other)])
    picked = np.random.default_rng(seed).integers(sums.shape[1], size=(_RESAMPLES, sums.shape[1]))
    totals = sums[:, picked].sum(2)
    low, high = np.quantile(totals[0] / totals[1], [0.025, 0.975])
    return Ratio(float(sums[0].sum() / sums[1].sum()), float(low), float(high))


def ratio_of_rates(arm: list[float], other: list[float]) -> Ratio:
    """Return the geometric mean of the runs' ratios; the interval is Student's over the runs'
    logarithms (3 runs: 4.3 deviations).
    """
    logs = np.log(np.array(arm) / np.array(other))
    half = 0.0
    if len(logs) > 1:
        half = (
            _STUDENT[min(len(logs), len(_STUDENT)) - 1] * float(logs.std(ddof=1)) / len(logs) ** 0.5
        )
    mean = float(logs.mean())
    return Ratio(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)))


_STUDENT = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


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
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_MEDIAN_RESAMPLES))
    tail = (1 - confidence) / 2
    return medians[int(tail * _MEDIAN_RESAMPLES)], medians[int((1 - tail) * _MEDIAN_RESAMPLES) - 1]


def _block_sums(runs: list[FloatArray]) -> FloatArray:
    """Return the sums of the blocks of all runs, float64[requests] each."""
    sums: FloatArray = np.concatenate(
        [np.add.reduceat(run, np.arange(0, len(run), BLOCK_REQUESTS)) for run in runs]
    )
    return sums
