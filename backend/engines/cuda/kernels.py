"""The functions that a step is made of, in Triton or in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional

from backend.engines.cuda import plain

MOST_INVARIANT_TOKENS = 64
"""Up to this many tokens our own product is as fast as cuBLAS (docs/adr/0041)."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of every function; ``layers``, ``trees`` and the modules of
    these names say what they take.

    ``linear(x, weight, bias)`` returns ``x @ weight.T + bias`` for ``x`` [tokens, inner].
    """

    add_rms_norm: Callable[..., torch.Tensor]
    rotate_and_store: Callable[..., None]
    apply_gate: Callable[..., None]
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    attention: Callable[..., torch.Tensor]
    bounds: Callable[..., torch.Tensor]
    draw: Callable[..., torch.Tensor]
    candidates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    pack: Callable[..., None]
    walk: Callable[..., None]
    move: Callable[..., None]


def plain_kernels() -> Kernels:
    """Return the functions in plain torch, for devices without Triton."""
    of_plain: dict[str, Any] = {
        field.name: getattr(plain, field.name, None) for field in fields(Kernels)
    }
    return Kernels(**of_plain | {"linear": functional.linear})


def has_own_product(device: torch.device) -> bool:
    """Return whether our own product runs on a GPU: it is written for Hopper's instructions, and
    needs more shared memory than others have.
    """
    return torch.cuda.get_device_capability(device)[0] == 9


def triton_kernels(*, invariant: bool, own_product: bool = True) -> Kernels:
    """Return the functions in Triton. ``invariant``: a row has the same bits in every batch, at a
    cost beyond ``MOST_INVARIANT_TOKENS``; else cuBLAS multiplies for more tokens than that, and
    for all without ``own_product``.
    """
    from backend.engines.cuda import attention, bounds, candidates, draw, layers, linear, trees

    def multiply(
        x: torch.Tensor,  # [tokens, in]
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:
        tiling = None
        if own_product and len(x) and (invariant or len(x) <= MOST_INVARIANT_TOKENS):
            tiling = linear.tiling_for(weight.shape[0], weight.shape[1], len(x))
        if tiling is None:
            return functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        return linear.linear(x, weight, out, bias, tiling=tiling)

    return Kernels(
        layers.add_rms_norm,
        layers.rotate_and_store,
        layers.apply_gate,
        multiply,
        attention.attention,
        bounds.bounds,
        draw.draw,
        candidates.candidates,
        trees.pack,
        trees.walk,
        trees.move,
    )
