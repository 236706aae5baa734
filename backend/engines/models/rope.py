"""The rotary embedding as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

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


def rope_tables(config: Rotary, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [positions, head_dim] of the rotary embedding in fp32, the first half of
    sin negated.

    With that sign, rotating is ``x * cos + roll(x, head_dim / 2) * sin``. Scaling as in
    transformers: ``linear`` divides the frequencies by the factor; ``llama3`` does so for long
    waves only and passes smoothly to short ones (Llama 3.1's ``config.json``).
    """
    inverse = 1.0 / config.rope_theta ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    )
    rope = config.rope
    if rope["rope_type"] == "linear":
        inverse = inverse / rope["factor"]
    elif rope["rope_type"] == "llama3":
        waves = (
            rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
        )  # waves that fit the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope["factor"] + smooth * inverse
    angles = torch.outer(torch.arange(positions).float(), inverse)
    return angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)
