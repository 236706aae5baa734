"""How requests deviate from a draft's level: a vector over the drafts, in logits, whose law is learnt from finished requests.

Deviations are normal with a covariance over the drafts, around 0 or what is expected of the request's group, so that evidence on the
drafts tried moves what is expected of the others: most easy requests are easy for every draft, but a text that one draft likes another may
dislike. A request's counts tell of its deviations x as normal observations would (Laplace's approximation): ``weight`` w = sum reached
h (1 - h) and ``pull`` = w x + sum (accepted - reached h), with the hazards h at the present x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .plan import FloatArray

_MIN_VARIANCE, _MAX_VARIANCE = 1e-3, 9.0
_FEW = 2  # requests, for which plain numbers are quicker


def shifted(level: FloatArray, shift: FloatArray) -> FloatArray:
    """Return hazards [..., positions] whose logits are those of ``level`` plus a shift [...]."""
    return at_odds(level, np.exp(shift)[..., None])


def at_odds(level: FloatArray, ratio: FloatArray) -> FloatArray:
    """Return hazards whose odds are those of ``level`` times a ratio."""
    hazard: FloatArray = ratio * level  # the odds, at first
    hazard /= hazard + (1 - level)
    return hazard


def told(level: FloatArray, shift: FloatArray, accepted: FloatArray, reached: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return what counts [n, D, K] of requests tell of their deviations, weight and pull [n, D], at the present ``shift`` [n, D]."""
    hazard = shifted(level, shift)
    expected = reached * hazard
    hazard = np.subtract(1.0, hazard, out=hazard)
    hazard *= expected
    weight = _over_positions(hazard)
    return weight, weight * shift + _over_positions(accepted - expected)


def told_weight(hazard: FloatArray, reached: FloatArray) -> FloatArray:
    """Return the weight [n, D] that ``told`` does, of hazards as they are shifted and counts, float64[K, D, n] each."""
    weight: FloatArray = np.add.reduce(reached * hazard * (1 - hazard)).T
    return weight


def _over_positions(counts: FloatArray) -> FloatArray:
    n, drafts, k_max = counts.shape
    total: FloatArray = counts.reshape(n * drafts, k_max).dot(_ones(k_max)).reshape(n, drafts)
    return total


@lru_cache(maxsize=8)
def _ones(count: int) -> FloatArray:
    return np.ones(count)


def posterior(covariance: FloatArray, weight: FloatArray, pull: FloatArray, mean: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean [n, D] and covariance [n, D, D] of deviations given evidence [n, D], from what was believed before (the same shapes).

    C = S (I + W S)^-1 and mean + C (pull - W mean). W is diagonal: draft after draft is one more observation (Kalman 1960), and all rows
    take it side by side, which is quicker than a factorisation of each.
    """
    n, drafts = weight.shape
    if 0 < n <= _FEW and drafts:
        told = zip(covariance.tolist(), weight.tolist(), pull.tolist(), mean.tolist(), strict=True)
        after = np.array([posterior_of_one(*one) for one in told])
        return after[:, :, drafts], after[:, :, :drafts]
    both = np.empty((drafts, drafts + 1, n))  # the covariance, and the mean beside it
    both[:, :drafts], both[:, drafts] = covariance.transpose(1, 2, 0), mean.T
    for d in range(drafts):
        row = weight[:, d] * both[d]
        row[drafts] -= pull[:, d]
        both -= (both[:, d] / (1.0 + row[d]))[:, None] * row
    return both[:, drafts].T, both[:, :drafts].transpose(2, 0, 1)


def posterior_covariance(covariance: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the covariance that ``posterior`` does."""
    n, drafts = weight.shape
    if n <= _FEW:
        zeros = np.zeros((n, drafts))
        return posterior(covariance, weight, zeros, zeros)[1]
    after: FloatArray = covariance.transpose(1, 2, 0).copy()
    for d in range(drafts):
        row = weight[:, d] * after[d]
        after -= (after[:, d] / (1.0 + row[d]))[:, None] * row
    return after.transpose(2, 0, 1)


def posterior_of_one(covariance: list[list[float]], weight: list[float], pull: list[float], mean: list[float]) -> list[list[float]]:
    """Return ``posterior`` of one request, by plain numbers: the covariance's rows, each with its mean behind it."""
    both, drafts = [[*row, m] for row, m in zip(covariance, mean, strict=True)], len(weight)
    for d in range(drafts):
        if weight[d] == pull[d] == 0.0:
            continue
        row = [weight[d] * x for x in both[d]]
        row[drafts] -= pull[d]
        scale = 1.0 / (1.0 + row[d])
        for i, line in enumerate(both):
            share = scale * line[d]
            both[i] = [x - share * y for x, y in zip(line, row, strict=True)]
    return both


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The covariance [D, D] of deviations, and of how many requests it was learnt (the prior counts for some)."""

    covariance: FloatArray
    requests: float

    @classmethod
    def prior(cls, drafts: int, variance: float, requests: float) -> Law:
        """Return what is believed before any request: drafts have nothing to do with each other."""
        return cls(bounded(variance * np.eye(drafts)), requests)

    def learnt(self, mean: FloatArray, covariance: FloatArray, most_requests: float) -> Law:
        """Return the law after one more request of this posterior: a step of expectation-maximisation (Dempster et al. 1977).

        Of a draft that the request has not tried its posterior says what the law said, so that it teaches nothing.
        """
        step = covariance + mean[:, None] * mean - self.covariance
        return Law(bounded(self.covariance + step / (self.requests + 1)), min(self.requests + 1, most_requests))


def bounded(covariance: FloatArray) -> FloatArray:
    """Return the nearest covariance whose variances along its axes are within bounds."""
    even: FloatArray = (covariance + covariance.T) / 2
    if _within_bounds(even.tolist()):
        return even
    values, axes = np.linalg.eigh(even)
    near: FloatArray = (axes * np.clip(values, _MIN_VARIANCE, _MAX_VARIANCE)) @ axes.T
    return near


def _within_bounds(covariance: list[list[float]]) -> bool:
    """Return whether no axis can be out of bounds: less the least variance it has only positive pivots, and its trace is no more than the
    most.
    """
    rest = [[x - _MIN_VARIANCE * (i == j) for j, x in enumerate(row)] for i, row in enumerate(covariance)]
    total = sum(row[i] for i, row in enumerate(covariance))
    while rest and rest[0][0] > 0:
        (pivot, *head), *tail = rest
        rest = [[x - row[0] / pivot * y for x, y in zip(row[1:], head, strict=True)] for row in tail]
    return not rest and total <= _MAX_VARIANCE
