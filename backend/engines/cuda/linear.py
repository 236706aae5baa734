"""A matrix product for few rows whose result for a row does not depend on the other rows.

One program computes a tile of the transposed product: the weights are the left operand, so that
Hopper's warp-group instruction takes 64 of their rows and 16 of the inner dimension at a time, in
order. Each element of the result is therefore the same sum for every number of rows and every
tiling: a row has the same bits alone and in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiling(NamedTuple):
    """How a product is cut: columns, inner elements and rows of a tile, pipeline stages, warps."""

    columns: int = 64
    inner: int = 128
    rows: int = 16
    stages: int = 5
    warps: int = 4
    tma: bool = False


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
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = m < rows
    x_at = x_ptr + m[None, :] * K + k[:, None]
    weight_at = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:  # weights are constant: the first tile is on its way before the kernel before ends
        gdc_launch_dependents()
        weight = tl.load(weight_at, eviction_policy="evict_first")
        gdc_wait()
        x = tl.load(x_at, mask=is_row[None, :], other=0.0)
        out = tl.dot(weight, x, out)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    for _ in range(BLOCK_K if PDL else 0, K, BLOCK_K):
        weight = tl.load(weight_at, eviction_policy="evict_first")
        x = tl.load(x_at, mask=is_row[None, :], other=0.0)
        out = tl.dot(weight, x, out)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if HAS_BIAS:
        out += tl.load(bias_ptr + n)[:, None].to(tl.float32)
    at = out_ptr + m[None, :] * N + n[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@triton.jit
def _linear_tma(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    rows,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    at_m, at_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    m, n = at_m + tl.arange(0, BLOCK_M), at_n + tl.arange(0, BLOCK_N)
    is_row = m < rows
    out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(0, K, BLOCK_K):
        weight = weight_desc.load([at_n, k])
        x = x_desc.load([at_m, k])
        out = tl.dot(weight, x.T, out)
    if HAS_BIAS:
        out += tl.load(bias_ptr + n)[:, None].to(tl.float32)
    at = out_ptr + m[None, :] * N + n[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: Tiling,
    pdl: bool = False,
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into ``out`` [rows, columns]; ``x`` is [rows, inner].

    Raises ValueError for a weight whose shape is no multiple of the tiling.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    if columns % tiling.columns or inner % tiling.inner:
        raise ValueError(f"weight {tuple(weight.shape)} is no multiple of {tiling}")
    left, right = x, weight
    if tiling.tma:
        left = TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inner])
        right = TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.inner])
    kernel = _linear_tma if tiling.tma else _linear
    kernel[(triton.cdiv(rows, tiling.rows), columns // tiling.columns)](
        left,
        right,
        weight if bias is None else bias,
        out,
        rows,
        columns,
        inner,
        HAS_BIAS=bias is not None,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.inner,
        PDL=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(pdl),
    )
    return out


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the options of a launch that may overlap with the end of the kernel before it
    (programmatic dependent launch, sm_90 and later).
    """
    return {"launch_pdl": True} if pdl else {}


def tiling_for(columns: int, inner: int, tokens: int) -> Tiling | None:
    """Return the tiling that was fastest on an H100 for a weight [columns, inner] and a number of
    tokens; None for a weight that is no multiple of any (docs/adr/0041).
    """
    is_wide = columns >= 16384
    if tokens <= 64:
        rows = max(16, triton.next_power_of_2(tokens))
        tiling = (
            Tiling(128, 128, rows, 4, 4, tma=True) if is_wide else Tiling(64, 128, rows, tma=True)
        )
    elif tokens <= 128 and not is_wide:
        tiling = Tiling(64, 128, 64, tma=True)
    else:
        tiling = Tiling(128, 64, 128, 5, 8, tma=True)
    if columns % tiling.columns or inner % tiling.inner:
        return None
    return tiling
