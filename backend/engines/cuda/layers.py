"""The small kernels of a decoder layer: residual and norm, rotary embedding and KV, gated unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.engines.cuda.linear import launch_options


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    exists = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    residual = tl.load(residual_ptr + row + column, mask=exists, other=0.0)
    if ADD:
        residual += tl.load(x_ptr + row + column, mask=exists, other=0.0)
        tl.store(residual_ptr + row + column, residual, mask=exists)
    wide = residual.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    tl.store(out_ptr + row + column, normed.to(residual.dtype) * weight, mask=exists)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place (None: nothing), and write its RMS norm into ``out``.

    Tensors are [tokens, hidden], ``weight`` [hidden].
    """
    tokens, hidden = residual.shape
    _add_rms_norm[(tokens,)](
        residual if x is None else x,
        residual,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ADD=x is not None,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    place_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF)
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    low, high = tl.load(source + column), tl.load(source + HALF + column)
    if head < HEADS + KV_HEADS:
        angle = tl.load(position_ptr + token).to(tl.int64) * HALF + column
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low = (a * cos - b * sin).to(low.dtype)
        high = (b * cos + a * sin).to(high.dtype)
    if head < HEADS:
        target = q_ptr + (token * HEADS + head) * DIM
    else:
        place = tl.load(place_ptr + token).to(tl.int64)
        is_value = (head - HEADS) // KV_HEADS
        kv_head = (head - HEADS) % KV_HEADS
        tile = ((place // PAGE) * 2 + is_value) * KV_HEADS + kv_head
        target = kv_ptr + (tile * PAGE + place % PAGE) * DIM
    tl.store(target + column, low)
    tl.store(target + HALF + column, high)


def rotate_and_store(
    qkv: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    place: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Rotate queries and keys of ``qkv`` [tokens, (heads + 2 kv_heads) dim]; write the queries
    into ``q`` [tokens, heads, dim], keys and values into ``kv`` [blocks, 2, kv_heads, page, dim].

    ``cos`` and ``sin`` are float32[positions, dim / 2], ``position`` int32[tokens]; ``place``
    int32[tokens] is where a token's KV lies: block times page plus its offset.
    """
    _, _, kv_heads, page, dim = kv.shape
    tokens, heads, _ = q.shape
    _rotate_and_store[(tokens, heads + 2 * kv_heads)](
        qkv,
        q,
        kv,
        cos,
        sin,
        position,
        place,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )


@triton.jit
def _silu_mul(x_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < INNER
    gate = tl.load(x_ptr + token * 2 * INNER + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * INNER + INNER + column, mask=exists, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out_ptr + token * INNER + column, activated * up, mask=exists)


def silu_mul(x: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Write silu(gate) * up into ``out`` [tokens, inner]; ``x`` [tokens, 2 inner] is gate, up."""
    tokens, inner = out.shape
    block = min(1024, triton.next_power_of_2(inner))
    _silu_mul[(tokens, triton.cdiv(inner, block))](
        x, out, INNER=inner, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl)
    )
    return out
