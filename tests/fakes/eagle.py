"""Random EAGLE-3 heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backend.engines.eagle.folder import EagleShape

SHAPE = EagleShape(
    vocab_size=96,
    draft_vocab_size=40,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(2, 4, 5),
)


def random_head(seed: int = 0, **changes: Any) -> tuple[EagleShape, dict[str, torch.Tensor]]:
    """Return a shape, ``SHAPE`` with ``changes``, and random tensors of it."""
    shape = replace(SHAPE, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        if name == "token_ids":
            ids = torch.randperm(shape.vocab_size, generator=generator)
            tensors[name] = ids[: shape.draft_vocab_size].sort().values
        elif len(size) == 1:
            tensors[name] = 1 + 0.3 * torch.randn(size, generator=generator)
        else:
            scale = 1.0 if "embed" in name else 2.0 / size[1] ** 0.5
            tensors[name] = scale * torch.randn(size, generator=generator)
    return shape, tensors
