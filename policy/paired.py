"""A running comparison of two ways to do the same, from pairs of measurements that fade."""

from __future__ import annotations

import math
from typing import NamedTuple

FADE = 0.97
"""The share of a sample's weight that is left after the next one."""
SURPRISED = 1.0
"""The weight that is left before a sample so far from the mean that something must have changed."""
SURPRISE = 3.5
"""Standard deviations from the mean that are a surprise."""
LEAST_SAMPLES = 6.0
"""The weight of samples below which there is no verdict."""
DECIDES = 3.5
"""Standard errors from zero that a verdict needs."""
CLEAR_SAMPLES, CLEAR = 2.5, 7.0
"""The same where there is no doubt."""
PROMISING_SAMPLES, PROMISING = 0.9, 2.0
"""The same where the first is only promising."""
MOST = 0.7
"""The largest sample either way, as a logarithm: one odd pair says no more than this."""
_PRIOR_DEVIATION, _PRIOR_SAMPLES = 0.05, 3.0


class Comparison(NamedTuple):
    """An estimate of a log-ratio from pairs: above 0 the first of the two is better."""

    weight: float = 0.0
    """The number of samples, faded."""
    squares: float = 0.0
    """The sum of their squared weights: how many independent samples the mean is worth."""
    mean: float = 0.0
    spread: float = 0.0
    """The faded sum of squared distances from the mean."""

    @property
    def deviation(self) -> float:
        """The standard deviation of a sample."""
        spread = self.spread + _PRIOR_SAMPLES * _PRIOR_DEVIATION**2
        return math.sqrt(spread / (self.weight + _PRIOR_SAMPLES))

    @property
    def error(self) -> float:
        """The standard error of the mean; inf without samples."""
        if not self.weight:
            return math.inf
        return self.deviation * math.sqrt(self.squares) / self.weight

    @property
    def is_better(self) -> bool:
        """Whether the first of the two is better by the sequential test."""
        return self._is_above(LEAST_SAMPLES, DECIDES) or self._is_above(CLEAR_SAMPLES, CLEAR)

    @property
    def is_promising(self) -> bool:
        """Whether the first may well be better."""
        return self._is_above(PROMISING_SAMPLES, PROMISING)

    @property
    def is_clearly_worse(self) -> bool:
        """Whether the first is worse by far more than the test needs."""
        return self.weight >= CLEAR_SAMPLES and -self.mean > CLEAR * self.error

    def _is_above(self, samples: float, errors: float) -> bool:
        return self.weight >= samples and self.mean > errors * self.error

    def learnt(self, sample: float) -> Comparison:
        """Return the comparison with one more sample, a logarithm of a ratio."""
        x = min(max(sample, -MOST), MOST)
        enough = self.weight >= LEAST_SAMPLES
        surprised = enough and abs(x - self.mean) > SURPRISE * self.deviation
        before = self.fade(SURPRISED / self.weight) if surprised else self
        fade = 1.0 if surprised else FADE
        weight, squares = fade * before.weight + 1, fade * fade * before.squares + 1
        mean = self.mean + (x - self.mean) / weight
        spread = fade * before.spread + (x - self.mean) * (x - mean)
        return Comparison(weight, squares, mean, spread)

    def fade(self, share: float) -> Comparison:
        """Return the comparison as if it had this share of its samples."""
        return Comparison(share * self.weight, share * self.squares, self.mean, share * self.spread)

    def reverse(self) -> Comparison:
        """Return what this says of the second against the first, with half the weight."""
        half = self.fade(0.5)
        return half._replace(mean=-self.mean)


def from_data(values: object) -> Comparison:
    """Return the comparison of a list of its fields. Raises ValueError for other data."""
    fields = Comparison._fields
    is_list = isinstance(values, list) and len(values) == len(fields)
    if not is_list or not all(type(v) is float and math.isfinite(v) for v in values):  # type: ignore[attr-defined]
        raise ValueError(f"must be the numbers {fields}, got {values!r}")
    comparison = Comparison(*values)  # type: ignore[misc]
    if not 0 < comparison.weight <= 1 / (1 - FADE) or comparison.squares <= 0:
        raise ValueError(f"weight and squares are out of range, got {values!r}")
    if comparison.spread < 0 or abs(comparison.mean) > 2 * MOST:
        raise ValueError(f"mean or spread is out of range, got {values!r}")
    return comparison
