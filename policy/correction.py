"""What measured times say of the tables: a factor for every part of a step, and the shape of the target's curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .latency import FIRST_DRAFT, VERIFY, LatencyCurve
from .plan import FloatArray, IntArray

MAX_CORRECTION = 8.0  # either way
_CORRECTION_RATE = 0.05
_IDLE_CORRECTION, _IDLE_KEEP = 1.5, 0.9995  # beyond it a draft's factor fades in every step without it: nothing else would try it again
_MAX_SURPRISE = 4.0  # one step's measured/predicted counts as at most this: a garbage collection is no trend

OCTAVES = 15
"""Places of a shape: 1, 2, 4, ... 16384 tokens."""

_LAST_PLACE = OCTAVES - 1 - 1e-9

MAX_SHAPE = math.log(2.0)  # either way
_MAX_SHAPE_SURPRISE = 0.25  # one step's
_SHAPE_RATE, _SHAPE_PRIOR = 0.05, 2.0  # of a surprise; at first as much as of a mean, the table being worth so many steps
_FADING = 0.998  # of the evidence by octave, in a step
_ENOUGH = 1.0  # evidence below which an octave is as its neighbours are
_APPLY_STEPS = 8  # from one curve to the next: making one takes as long as planning for a row


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """By how much the target's curve is off at 1, 2, 4, ... tokens beside its factor, float64[OCTAVES] each.

    ``log_factor`` as learnt so far, ``seen`` the fading number of steps behind it, ``applied`` what is planned with: the same as it was at
    most ``_APPLY_STEPS`` steps ago, ``age`` of them. An octave without steps takes after its neighbours.
    """

    log_factor: FloatArray
    seen: FloatArray
    applied: FloatArray
    age: int = 0

    @classmethod
    def flat(cls) -> Shape:
        """Return the shape before anything was measured."""
        return cls(np.zeros(OCTAVES), np.zeros(OCTAVES), np.zeros(OCTAVES))


class Target(NamedTuple):
    """The target's part of a step: total tokens, the seconds that the curve's base has for them, and those for rows and context."""

    tokens: int
    base_s: float
    other_s: float


@lru_cache(maxsize=8)
def _octaves(count: int) -> tuple[IntArray, FloatArray]:
    """Return of 0 .. count - 1 tokens the octave below, and how far they are on the way to the next."""
    place = np.log2(np.maximum(np.arange(count), 1)).clip(max=_LAST_PLACE)
    low = place.astype(np.int64)
    return low, place - low


def shaped(curve: LatencyCurve, log_factor: FloatArray) -> LatencyCurve:
    """Return the curve with its base corrected, linearly in the logarithm of the tokens between octaves; it never falls."""
    if not log_factor.any():
        return curve
    low, share = _octaves(len(curve.base_s))
    at = np.exp(log_factor)
    factor = at.take(low)
    factor += share * np.diff(at).take(low)
    return LatencyCurve(np.maximum.accumulate(curve.base_s * factor), curve.slope_s * factor.item(-1), curve.row_s, curve.context_s)


def learnt(
    correction: FloatArray, shape: Shape, predicted_s: FloatArray, measured_s: FloatArray, target: Target
) -> tuple[FloatArray, Shape]:
    """Return the correction and the shape after one step.

    ``predicted_s`` are uncorrected predictions per part (places as in ``policy.latency``), ``measured_s`` what they took. The step's two
    octaves share what surprises in the target's time. What all octaves have in common, by evidence, is the target's factor.
    """
    measured = measured_s.item(VERIFY) if target.tokens else 0.0
    if not (target.base_s > 0 and measured > 0):
        return corrected(correction, predicted_s, measured_s), shape
    place = min(math.log2(target.tokens), _LAST_PLACE)
    low = int(place)
    share = place - low
    log_factor, seen = shape.log_factor.copy(), _FADING * shape.seen
    predicted_s = predicted_s.copy()
    predicted_s[VERIFY] = target.base_s * math.exp((1 - share) * log_factor.item(low) + share * log_factor.item(low + 1)) + target.other_s
    surprise = math.log(measured / (predicted_s.item(VERIFY) * correction.item(VERIFY)))
    clipped = min(max(surprise, -_MAX_SHAPE_SURPRISE), _MAX_SHAPE_SURPRISE)
    for octave, part in ((low, 1 - share), (low + 1, share)):
        change = part * max(_SHAPE_RATE, 1 / (_SHAPE_PRIOR + seen.item(octave))) * clipped
        log_factor[octave] = min(max(log_factor.item(octave) + change, -MAX_SHAPE), MAX_SHAPE)
        seen[octave] += part
    correction = corrected(correction, predicted_s, measured_s)
    if shape.age + 1 < _APPLY_STEPS:
        return correction, Shape(log_factor, seen, shape.applied, shape.age + 1)
    return _applied(correction, log_factor, seen)


def _applied(correction: FloatArray, log_factor: FloatArray, seen: FloatArray) -> tuple[FloatArray, Shape]:
    """Return the correction and the shape to plan with from now on: unseen octaves filled in, the common factor taken out."""
    known = (seen >= _ENOUGH).nonzero()[0]
    if not len(known):
        return correction, Shape(log_factor, seen, np.zeros(OCTAVES))
    common = float(seen[known] @ log_factor[known] / seen[known].sum())
    filled = np.interp(np.arange(OCTAVES), known, log_factor[known] - common).clip(-MAX_SHAPE, MAX_SHAPE)
    correction = correction.copy()
    correction[VERIFY] = min(max(correction[VERIFY] * math.exp(common), 1 / MAX_CORRECTION), MAX_CORRECTION)
    return correction, Shape(filled, seen, filled)


def corrected(correction: FloatArray, predicted_s: FloatArray, measured_s: FloatArray) -> FloatArray:
    """Return the correction after one step.

    ``predicted_s`` are uncorrected predictions per part, ``measured_s`` what they took; parts with either at 0 keep their factor. A slow
    geometric average, each step's surprise clipped, the factor bounded to 1/8..8. A draft that was slow once and is not used since is
    believed to be as slow for a few thousand steps.
    """
    factors = correction.tolist()
    for part, (predicted, measured) in enumerate(zip(predicted_s.tolist(), measured_s.tolist(), strict=True)):
        if predicted > 0 and measured > 0:
            surprise = min(max(measured / (predicted * factors[part]), 1 / _MAX_SURPRISE), _MAX_SURPRISE)
            factors[part] = min(max(factors[part] * surprise**_CORRECTION_RATE, 1 / MAX_CORRECTION), MAX_CORRECTION)
        elif part >= FIRST_DRAFT and not predicted and factors[part] > _IDLE_CORRECTION:
            factors[part] = max(factors[part] * _IDLE_KEEP, _IDLE_CORRECTION)
    return np.array(factors)


def correction_by_part(correction: FloatArray, drafts: Sequence[str]) -> dict[str, float]:
    """Return the correction by the names of ``Outcome.parts_s``, for metrics: 1 = the table still holds."""
    return dict(zip(("verify", "overhead", *(f"draft:{name}" for name in drafts)), correction.tolist(), strict=True))
