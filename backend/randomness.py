"""Counter-based uniforms: every random decision has its own key (seed, position, purpose, attempt, lane) and needs no state.

The same key always gives the same number, and two decisions never share one. The mix is SplitMix64's finaliser (Steele, Lea and Flood,
*Fast splittable pseudorandom number generators*, OOPSLA 2014), applied once per field of the key.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Purpose(IntEnum):
    """What a number decides: a draft's proposal, whether it is accepted, the token that the target itself emits, or a coupled race."""

    PROPOSE = 1
    ACCEPT = 2
    EMIT = 3
    RACE = 4


def uniforms(seed: Any, position: Any, purpose: Purpose, attempt: Any, lane: Any = 0) -> npt.NDArray[np.float64]:
    """Return float64 in [0, 1) with 53 random bits, one per element of the broadcast integer arguments.

    ``position`` is the index in the sequence of the token decided about, ``attempt`` the sequence's step; integers are taken modulo 2**64.
    ``lane`` tells apart what has all of these in common: the candidates that drafts propose for one place (``draft_lane``), and the tests
    of one place's candidates in their order. Both it and ``attempt`` stay below 2**32.
    """
    mixed = mix(key(seed, position, purpose) ^ (_words(attempt) | _words(lane) << np.uint64(32)))
    values: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return values


def draft_lane(draft: str) -> int:
    """Return the lane of a draft's first candidate for a place; its further ones (at most 255) count up from there."""
    return crc32(draft.encode()) >> 8 << 8


def key(seed: Any, position: Any, purpose: Purpose) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each element of the broadcast arguments, for a further field to be mixed in."""
    mixed = mix(_words(seed))
    for field in (position, int(purpose)):
        mixed = mix(mixed ^ _words(field))
    return mixed


def _words(value: Any) -> npt.NDArray[np.uint64]:
    try:
        return np.asarray(value, np.int64).view(np.uint64)
    except OverflowError:  # a seed may be beyond any machine integer
        values = np.asarray(value, dtype=object)
        return np.array([int(item) & _MASK for item in values.flat], np.uint64).reshape(values.shape)


def mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's finaliser of 64-bit words."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        word = word + _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))
