"""The rotary embedding as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that ``rope_tables`` computes."""


class Rotary(Protocol):
    """The settings of a rotary embedding, as transformers names them."""

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        ...

    @property
    def rope_theta(self) -> float:
        """The base of the frequencies."""
        ...

    @property
    def rope(self) -> Mapping[str, Any]:
        """``rope_type`` and its parameters."""
        ...


def rope_tables(config: Rotary, positions: int, arrays: Any = np) -> tuple[Any, Any]:
    """Return cos and sin [positions, head_dim] of the rotary embedding in fp32, the first half of
    sin negated. ``arrays``: the module that computes them, numpy, or torch for transformers' bits.

    With that sign, rotating is ``x * cos + roll(x, head_dim / 2) * sin``. Scaling as in
    transformers: ``linear`` divides the frequencies by the factor; ``llama3`` does so for long
    waves only and passes smoothly to short ones (Llama 3.1's ``config.json``).
    """
    fp32, rope = arrays.float32, config.rope
    powers = arrays.arange(0, config.head_dim, 2, dtype=fp32) / config.head_dim
    inverse = 1.0 / float(config.rope_theta) ** powers
    if rope["rope_type"] == "linear":
        inverse = inverse / rope["factor"]
    elif rope["rope_type"] == "llama3":
        waves = (
            rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
        )  # waves that fit the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((waves - low) / (high - low)).clip(0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope["factor"] + smooth * inverse
    angles = arrays.outer(arrays.arange(positions, dtype=fp32), inverse)
    cos, sin = arrays.cos(angles), arrays.sin(angles)
    return arrays.concatenate((cos, cos), 1), arrays.concatenate((-sin, sin), 1)
