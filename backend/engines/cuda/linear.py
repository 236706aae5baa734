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
    """How a product is cut: columns, inner elements and rows of a tile, pipeline stages, warps, and
    parts of the inner dimension (1 or 2).
    """

    columns: int = 64
    inner: int = 128
    rows: int = 16
    stages: int = 5
    warps: int = 4
    parts: int = 1


@triton.jit
def _linear(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    at_m, at_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    part = tl.program_id(2)
    begin, end = part * (K // PARTS), (part + 1) * (K // PARTS)
    m, n = at_m + tl.arange(0, BLOCK_M), at_n + tl.arange(0, BLOCK_N)
    is_row = m < rows
    out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:  # weights are constant: the first tile is on its way before the kernel before ends
        gdc_launch_dependents()
        weight = weight_desc.load([at_n, begin])
        gdc_wait()
        x = x_desc.load([at_m, begin])
        out = tl.dot(weight, x.T, out)
        begin += BLOCK_K
    for k in range(begin, end, BLOCK_K):
        weight = weight_desc.load([at_n, k])
        x = x_desc.load([at_m, k])
        out = tl.dot(weight, x.T, out)
    at = m[None, :] * N + n[:, None]
    is_last = part == PARTS - 1
    if PARTS == 2:  # the part that comes second adds the other's sum to its own
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        lane = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partial_ptr + (tile * 2 + part) * BLOCK_N * BLOCK_M + lane
        other = partial_ptr + (tile * 2 + 1 - part) * BLOCK_N * BLOCK_M + lane
        tl.store(mine, out)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1) == 1
        if is_last:
            tl.debug_barrier()
            out += tl.load(other, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        if HAS_BIAS:
            out += tl.load(bias_ptr + n)[:, None].to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of parts, 64 MiB, and their counters, which are zero between products."""
    if device not in _workspaces:
        partial = torch.empty(1 << 24, dtype=torch.float32, device=device)
        _workspaces[device] = partial, torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return _workspaces[device]


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

    Products of two parts share a workspace: they must not run at once in several streams. Raises
    ValueError for a weight whose shape is no multiple of the tiling, and for too many tiles.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    if columns % tiling.columns or inner % (tiling.inner * tiling.parts):
        raise ValueError(f"weight {tuple(weight.shape)} is no multiple of {tiling}")
    grid = (triton.cdiv(rows, tiling.rows), columns // tiling.columns, tiling.parts)
    partial, arrived = (out, out) if tiling.parts == 1 else _workspace(x.device)
    if tiling.parts == 2:
        tiles = grid[0] * grid[1]
        if tiles > len(arrived) or tiles * 2 * tiling.rows * tiling.columns > len(partial):
            raise ValueError(f"{rows} rows of weight {tuple(weight.shape)} are too many for parts")
    _linear[grid](
        TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inner]),
        TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.inner]),
        weight if bias is None else bias,
        out,
        partial,
        arrived,
        rows,
        columns,
        inner,
        HAS_BIAS=bias is not None,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.inner,
        PARTS=tiling.parts,
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
        tiling = Tiling(128, 128, rows, 4, 4) if is_wide else Tiling(64, 128, rows)
    elif tokens <= 128 and not is_wide:
        tiling = Tiling(64, 128, 64)
    else:
        tiling = Tiling(128, 64, 128, 5, 8)
    if columns % tiling.columns or inner % tiling.inner:
        return None
    return tiling
