"""Matrices in int8 with a scale for each output (CPUs with VNNI); what they are multiplied with
keeps bf16's precision and more.

A row is scaled to its greatest value and split into two digits of 8 bits, so that integer products,
which are exact, serve for both: a row's result is the same to the bit in any batch. One digit would
halve the work, but outliers leave it too coarse (docs/results/int8.md).
"""

from __future__ import annotations

import math
import warnings

import torch

from backend.engines.torch.checkpoint import CheckpointError

MOST = 127
"""The greatest digit: of weights, and of both of a row's."""

BASE = 2 * MOST
"""What the second digit counts in: the first is off by a half at the most."""

ZERO_POINT = 128


class Int8Linear:
    """``x @ weight.T + bias`` with the weight rounded to int8, a scale for each of its rows."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack a weight [out, in]; CheckpointError where the processor has no exact int8
        products.
        """
        if not _exact():
            raise CheckpointError("dtype int8 needs a CPU with VNNI")
        self._packed = _pack(weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of ``rows`` [rows, in]."""
        count, wide = len(rows), rows.float()
        unit = torch.linalg.vector_norm(wide, math.inf, 1, True).div_(MOST).clamp_(min=1e-30)
        scaled = wide / unit
        digits = torch.empty(2 * count, rows.shape[1])
        torch.round(scaled, out=digits[:count])
        torch.sub(scaled, digits[:count], out=digits[count:]).mul_(BASE)
        products = _multiply(digits, self._packed)
        result = torch.add(products[:count], products[count:], alpha=1 / BASE).mul_(unit)
        return (result if self._bias is None else result.add_(self._bias)).to(rows.dtype)


def _pack(weight: torch.Tensor) -> torch.ScriptObject:
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_(min=1e-30) / MOST
    whole = (wide / scales[:, None]).round_().to(torch.int8)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch means to drop quantised tensors some day; here they only carry weight and scales
        tensor = torch._make_per_channel_quantized_tensor(
            whole, scales.double(), torch.zeros(len(whole), dtype=torch.int64), 0
        )
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(tensor, None)
    return packed


def _multiply(digits: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """Return the products with a weight in fp32 (FBGEMM sums them in int32)."""
    product: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        digits, 1.0, ZERO_POINT, packed
    )
    return product


def _exact() -> bool:
    """Return whether the greatest products add up without saturation."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    greatest = torch.full((2, 64), float(MOST))
    weight = _pack(torch.full((4, 64), float(MOST)))
    return bool((_multiply(greatest, weight) == 64.0 * MOST * MOST).all())
