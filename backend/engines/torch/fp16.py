"""Matrices in fp16, products in fp32 (FBGEMM): half the bytes to read, for processors that have no
products in bf16.

A weight that was bf16 keeps all its bits here, but for those below 8e-6 (off by 3e-8 at the most),
and activations are never rounded: texts are nearer to fp32's than those of bf16. On AVX2 products
take a third to a half of fp32's time at one to six rows (docs/results/fp16.md).
"""

from __future__ import annotations

import torch

from backend.engines.torch.checkpoint import CheckpointError


class Fp16Linear:
    """``x @ weight.T + bias`` in fp32 with the weight rounded to fp16."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack a weight [out, in] that fp16 can hold; CheckpointError where the processor has no
        such products.
        """
        if not supported():
            raise CheckpointError("dtype fp16 needs a CPU with AVX2")
        self._packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None
        )
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of ``rows`` [rows, in]."""
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._packed)
        return (product if self._bias is None else product.add_(self._bias)).to(rows.dtype)


def supported() -> bool:
    """Return whether torch has these products for the processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines
