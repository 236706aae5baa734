"""How requests deviate from a draft's level: a vector over the drafts, in logits, whose law is learnt from finished requests.

Deviations are normal with a covariance over the drafts, around 0 or what is expected of the request's group, so that evidence on the
drafts tried moves what is expected of the others: most easy requests are easy for every draft, but a text that one draft likes another may
dislike. A request's counts tell of its deviations x as normal observations would (Laplace's approximation): ``weight`` w = sum reached
h (1 - h) and ``pull`` = w x + sum (accepted - reached h), with the hazards h at the present x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import FloatArray

_MIN_VARIANCE, _MAX_VARIANCE = 1e-3, 9.0


def shifted(level: FloatArray, shift: FloatArray) -> FloatArray:
    """Return hazards [..., positions] whose logits are those of ``level`` plus a shift [...]."""
    hazard: FloatArray = np.exp(shift)[..., None] * level  # the odds, at first
    hazard /= hazard + (1 - level)
    return hazard


def posterior(
    covariance: FloatArray, weight: FloatArray, pull: FloatArray, mean: FloatArray | float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Return mean [n, D] and covariance [n, D, D] of deviations given evidence [n, D]: C = S (I + W S)^-1, mean + C (pull - W mean)."""
    left = np.eye(weight.shape[-1]) + weight[..., None] * covariance
    after: FloatArray = np.linalg.solve(left.swapaxes(-1, -2), np.broadcast_to(covariance, left.shape))  # S and C are symmetric
    moved: FloatArray = mean + (after @ (pull - weight * mean)[..., None])[..., 0]
    return moved, after


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
    values, axes = np.linalg.eigh((covariance + covariance.T) / 2)
    near: FloatArray = (axes * np.clip(values, _MIN_VARIANCE, _MAX_VARIANCE)) @ axes.T
    return near
