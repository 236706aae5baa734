"""A matrix product for few rows whose result for a row does not depend on the other rows.

One program computes a tile of columns for a tile of rows and walks the inner dimension in one
order. The block along that dimension and the tensor-core instruction are the same for every number
of rows, so a row has the same bits alone and in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tiling(NamedTuple):
    """How a product is cut: columns and inner elements of a tile, warps, and pipeline stages.

    ``swap`` computes the transposed tile, with the weights as the left operand: on Hopper that
    reads them through its warp-group instruction.
    """

    columns: int = 32
    inner: int = 256
    stages: int = 3
    warps: int = 4
    swap: bool = False


@triton.jit
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_row = m < rows
    if SWAP:
        x_at = x_ptr + m[None, :] * K + k[:, None]
        weight_at = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
        out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for _ in range(0, K, BLOCK_K):
            weight = tl.load(weight_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_row[None, :], other=0.0)
            out = tl.dot(weight, x, out)
            x_at += BLOCK_K
            weight_at += BLOCK_K
        if HAS_BIAS:
            out += tl.load(bias_ptr + n)[:, None].to(tl.float32)
        at = out_ptr + m[None, :] * N + n[:, None]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[None, :])
    else:
        x_at = x_ptr + m[:, None] * K + k[None, :]
        weight_at = weight_ptr + n[None, :].to(tl.int64) * K + k[:, None]
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, K, BLOCK_K):
            weight = tl.load(weight_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_row[:, None], other=0.0)
            out = tl.dot(x, weight, out)
            x_at += BLOCK_K
            weight_at += BLOCK_K
        if HAS_BIAS:
            out += tl.load(bias_ptr + n)[None, :].to(tl.float32)
        at = out_ptr + m[:, None] * N + n[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: Tiling = Tiling(),  # noqa: B008 (immutable)
    block_rows: int | None = None,
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into ``out`` [rows, columns]; ``x`` is [rows, inner].

    ``block_rows`` are the rows of a tile; None: 16, or 32 where there are more rows than that.

    Raises ValueError for a weight whose shape is no multiple of the tiling.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    if columns % tiling.columns or inner % tiling.inner:
        raise ValueError(f"weight {tuple(weight.shape)} is no multiple of {tiling}")
    block_m = block_rows or (16 if rows <= 16 else 32)
    _linear[(columns // tiling.columns, triton.cdiv(rows, block_m))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        inner,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.inner,
        SWAP=tiling.swap,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
