"""A matrix product for few rows whose result for a row does not depend on the other rows.

One program computes a tile of the transposed product: the weights are the left operand, so that
Hopper's warp-group instruction takes 64 of their rows and 16 of the inner dimension at a time, in
order. Each element of the result is therefore the same sum for every number of rows and every
tiling: a row has the same bits alone and in any batch (docs/adr/0041).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiling(NamedTuple):
    """How a product is cut: columns, inner elements and rows of a tile, pipeline stages, warps."""

    columns: int
    inner: int
    rows: int
    stages: int
    warps: int


@triton.jit
def _linear(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    at_m, at_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    m, n = at_m + tl.arange(0, BLOCK_M), at_n + tl.arange(0, BLOCK_N)
    out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, inner, BLOCK_K):
        weight = weight_desc.load([at_n, k])
        x = x_desc.load([at_m, k])
        out = tl.dot(weight, x.T, out)
    if HAS_BIAS:
        out += tl.load(bias_ptr + n)[:, None].to(tl.float32)
    at = out_ptr + m[None, :] * columns + n[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :])


def linear(
    x: torch.Tensor,  # [rows, inner]
    weight: torch.Tensor,  # [columns, inner]
    out: torch.Tensor,  # [rows, columns]
    bias: torch.Tensor | None = None,  # [columns]
    *,
    tiling: Tiling,
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into ``out``.

    Raises ValueError for a weight whose shape is not a multiple of the tiling.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    if columns % tiling.columns or inner % tiling.inner:
        raise ValueError(f"weight {tuple(weight.shape)} is not a multiple of {tiling}")
    left = TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inner])
    right = TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.inner])
    added, size = weight if bias is None else bias, (rows, columns, inner)
    blocks = {"BLOCK_M": tiling.rows, "BLOCK_N": tiling.columns, "BLOCK_K": tiling.inner}
    ways = {"HAS_BIAS": bias is not None, "num_warps": tiling.warps, "num_stages": tiling.stages}
    grid = triton.cdiv(rows, tiling.rows), columns // tiling.columns
    _linear[grid](left, right, added, out, *size, **blocks, **ways)
    return out


_LEAST_COLUMNS, _LEAST_INNER = 64, 16
"""Smallest sizes of one instruction of Hopper's warp groups."""


def tiling_for(columns: int, inner: int, tokens: int) -> Tiling | None:
    """Return the fastest tiling measured on an H100 for a weight [columns, inner] and a number of
    tokens, cut where the weight is no multiple of it. None, for every number of tokens, where its
    columns are no multiple of 64 or ``inner`` is none of 16.
    """
    is_wide = columns >= 16384
    fewer_rows = triton.cdiv(tokens, 64) * 64 < triton.cdiv(tokens, 128) * 128
    if tokens <= 64:
        rows = max(16, triton.next_power_of_2(tokens))
        tiling = Tiling(128, 128, rows, 4, 4) if is_wide else Tiling(64, 128, rows, 5, 4)
    elif is_wide:
        tiling = Tiling(256, 64, 64, 5, 8) if fewer_rows else Tiling(128, 64, 128, 5, 8)
    elif tokens <= 128:
        tiling = Tiling(64, 128, 64, 5, 4)
    else:
        tiling = Tiling(128, 64, 64, 6, 4) if fewer_rows else Tiling(128, 64, 128, 5, 8)
    if columns % _LEAST_COLUMNS or inner % _LEAST_INNER:
        return None
    cut = tiling._replace(inner=math.gcd(tiling.inner, inner))
    if columns % tiling.columns:
        cut = cut._replace(columns=_LEAST_COLUMNS, warps=4)
    return cut
