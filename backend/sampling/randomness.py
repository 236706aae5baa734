"""A request's own noise: a number for every (seed, position, token), without any state.

The same three always give the same number. The mix is SplitMix64's finaliser (Steele, Lea and
Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014), applied once for each of
them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Words [rows] of (seed, position): the noise of the place that a row draws a token for."""

TAIL = np.uint64(2**64 - 1)
"""Stands in for a token where all the improbable ones race as one; no token has this number."""

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def word(seed: int, position: int) -> int:
    """Return 64 bits for the token number ``position`` (from 0) of a text with this seed."""
    return _mix(seed_word(seed) ^ (position & _MASK))


def exponentials(words: Words) -> npt.NDArray[np.float64]:
    """Return a standard exponential, of 53 random bits, for each word xor token: float64, like
    ``words`` [q] or of any shape.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        mixed = words + np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    uniforms = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: npt.NDArray[np.float64] = -np.log(uniforms)
    return noise


@lru_cache(maxsize=4096)
def seed_word(seed: int) -> int:
    """Return the 64 bits that a seed stands for."""
    return _mix(seed & _MASK)


def _mix(number: int) -> int:
    """Return SplitMix64's finaliser; plain integers, for one number arrays take twenty times as
    long.
    """
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)
