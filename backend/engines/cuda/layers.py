"""The small kernels of a decoder layer: residual and norm, rotary embedding and KV, gated unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    exists = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0)
    residual = tl.load(residual_ptr + row + column, mask=exists, other=0.0)
    if ADD:
        residual += tl.load(x_ptr + row + column, mask=exists, other=0.0)
        tl.store(residual_ptr + row + column, residual, mask=exists)
    wide = residual.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    if WIDE:
        scaled = (normed * weight.to(tl.float32)).to(residual.dtype)
    else:
        scaled = normed.to(residual.dtype) * weight
    tl.store(out_ptr + row + column, scaled, mask=exists)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    wide: bool = False,
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place (None: nothing), and write its RMS norm into ``out``.

    Tensors are [tokens, hidden], ``weight`` [hidden]. With ``wide`` the weight multiplies before
    the result is rounded, as Gemma's does.
    """
    tokens, hidden = residual.shape
    shape = {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden), "num_warps": 8}
    added = residual if x is None else x
    _add_rms_norm[(tokens,)](
        added, residual, weight, out, eps, ADD=x is not None, WIDE=wide, **shape
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    place_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, HALF_BLOCK)
    is_half = column < HALF
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    low = tl.load(source + column, mask=is_half, other=0.0)
    high = tl.load(source + HALF + column, mask=is_half, other=0.0)
    other = tl.arange(0, REST_BLOCK)  # dimensions that are not rotated
    is_rest = other < DIM - ROTARY
    rest = tl.load(source + ROTARY + other, mask=is_rest, other=0.0)
    if head < HEADS + KV_HEADS:
        a, b, c = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
        if HAS_NORM:
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            square = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
            scale = tl.rsqrt(square / DIM + eps)
            weight_a = tl.load(norm_ptr + column, mask=is_half, other=0.0)
            weight_b = tl.load(norm_ptr + HALF + column, mask=is_half, other=0.0)
            weight_c = tl.load(norm_ptr + ROTARY + other, mask=is_rest, other=0.0)
            a = ((a * scale).to(low.dtype) * weight_a).to(tl.float32)
            b = ((b * scale).to(low.dtype) * weight_b).to(tl.float32)
            c = ((c * scale).to(low.dtype) * weight_c).to(tl.float32)
            rest = c.to(rest.dtype)
        at = token * ROTARY + column
        cos = tl.load(cos_ptr + at, mask=is_half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=is_half, other=0.0).to(tl.float32)
        low = (a * cos - b * sin).to(low.dtype)
        high = (b * cos + a * sin).to(high.dtype)
    if head < HEADS:
        target = q_ptr + (token * HEADS + head) * DIM
    else:
        place = tl.load(place_ptr + token).to(tl.int64)
        is_value = (head - HEADS) // KV_HEADS
        if is_value > 0:  # without NaN, as ``Pages.store`` says
            low = tl.where(low == low, low, 0.0)
            high = tl.where(high == high, high, 0.0)
            rest = tl.where(rest == rest, rest, 0.0)
        kv_head = (head - HEADS) % KV_HEADS
        tile = ((place // PAGE) * 2 + is_value) * KV_HEADS + kv_head
        target = kv_ptr + (tile * PAGE + place % PAGE) * DIM
    tl.store(target + column, low, mask=is_half)
    tl.store(target + HALF + column, high, mask=is_half)
    tl.store(target + ROTARY + other, rest, mask=is_rest)


def rotate_and_store(
    qkv: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    place: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries and keys of ``qkv`` [tokens, (heads + 2 kv_heads) dim]; write the queries
    into ``q`` [tokens, heads, dim], keys and values into ``kv`` [blocks, 2, kv_heads, page, dim].

    ``cos`` and ``sin`` are [tokens, rotary]; their first halves are read. Dimensions from
    ``rotary`` on are not rotated. ``q_norm`` and ``k_norm`` [dim] are weights of RMS norms of each
    head before the rotation, with ``eps``; both or none. ``place`` int32[tokens] is where a
    token's KV lies: block times page plus its offset.
    """
    _, _, kv_heads, page, dim = kv.shape
    tokens, heads, _ = q.shape
    rotary = cos.shape[-1]
    norms = [qkv if norm is None else norm for norm in (q_norm, k_norm)]
    rest = max(2, triton.next_power_of_2(dim - rotary)) if dim > rotary else 2
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "ROTARY": rotary, "PAGE": page}
    blocks = {"HALF_BLOCK": triton.next_power_of_2(rotary // 2), "REST_BLOCK": rest}
    ways = {"HAS_NORM": q_norm is not None, **blocks, "num_warps": 1}
    grid = tokens, heads + 2 * kv_heads
    _rotate_and_store[grid](qkv, q, kv, cos, sin, place, *norms, eps, **shape, **ways)


@triton.jit
def _gated(x_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < INNER
    gate = tl.load(x_ptr + token * 2 * INNER + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * INNER + INNER + column, mask=exists, other=0.0)
    slope = gate
    if GELU:  # its tanh form: x (1 + tanh(y)) / 2 is x sigmoid(2 y)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(up.dtype)
    tl.store(out_ptr + token * INNER + column, activated * up, mask=exists)


def apply_gate(x: torch.Tensor, out: torch.Tensor, *, gelu: bool = False) -> None:
    """Write act(gate) * up into ``out`` [tokens, inner]; ``x`` [tokens, 2 inner] is gate and up.

    The activation is SiLU, or GELU by tanh.
    """
    tokens, inner = out.shape
    block = min(1024, triton.next_power_of_2(inner))
    shape = {"INNER": inner, "BLOCK": block, "num_warps": 4}
    _gated[(tokens, triton.cdiv(inner, block))](x, out, GELU=gelu, **shape)
