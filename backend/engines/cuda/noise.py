"""A request's own noise as ``sampling.randomness`` defines it, for torch on any device."""

from __future__ import annotations

import torch

_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mix(word: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finaliser of the bits of int64."""
    word = word + _GOLDEN
    word = (word ^ _shift(word, 30)) * _FIRST
    word = (word ^ _shift(word, 27)) * _SECOND
    return word ^ _shift(word, 31)


def exponentials(words: torch.Tensor) -> torch.Tensor:
    """Return a standard exponential, float64, for the bits of each word int64."""
    return -torch.log((_shift(mix(words), 11).double() + 0.5) * 2.0**-53)


def _shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros from the left, which torch's int64 does not."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
