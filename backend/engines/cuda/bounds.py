"""The least logit that top-k, top-p and min-p leave a row, on the device and without a sort.

A float's bits, its sign turned, order as the float does. So the bound is selected four bits at a
time: one kernel sums what the logits of a chunk weigh by their next four bits, a second one adds up
the chunks and chooses the digit at which the greatest logits reach the target (radix select). A
logit weighs one for top-k and its probability for top-p. Sums have a fixed order, so a row has the
same bound in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BINS = tl.constexpr(16)
_SIGN = tl.constexpr(0x80000000)


@triton.jit
def _load_row(logits_ptr, stride, row, column, vocab):
    return tl.load(
        logits_ptr + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf")
    ).to(tl.float32)


@triton.jit
def _keys(x):
    """Return the bits of floats as uint32 that order as the floats do."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= _SIGN, ~bits, bits | _SIGN)


@triton.jit
def _measure_tops(logits_ptr, stride, top_ptr, vocab, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    x = _load_row(logits_ptr, stride, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
    tl.store(top_ptr + row * chunks + chunk, tl.max(x, 0))


@triton.jit
def _row_top(top_ptr, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return tl.max(tops, 0)


@triton.jit
def _find_likely(
    logits_ptr,
    stride,
    temperature_ptr,
    min_p_ptr,
    top_ptr,
    least_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store each chunk's least logit whose probability is at least min-p of the greatest."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    min_p = tl.load(min_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if (min_p > 0.0) & (temperature > 0.0):
        x = _load_row(logits_ptr, stride, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        score = (x - _row_top(top_ptr, row, chunks, CHUNKS)) / temperature
        least = tl.min(tl.where(score >= tl.log(min_p), x, float("inf")), 0)
        tl.store(least_ptr + row * chunks + chunk, least)


@triton.jit
def _start(temperature_ptr, min_p_ptr, least_ptr, bound_ptr, chunks, CHUNKS: tl.constexpr):
    """Store the rows' bounds by min-p alone."""
    row = tl.program_id(0)
    bound = float("-inf")
    if (tl.load(min_p_ptr + row) > 0.0) & (tl.load(temperature_ptr + row) > 0.0):
        chunk = tl.arange(0, CHUNKS)
        exists = chunk < chunks
        least = tl.load(least_ptr + row * chunks + chunk, mask=exists, other=float("inf"))
        bound = tl.min(least, 0)
    tl.store(bound_ptr + row, bound)


@triton.jit
def _weigh_digits(
    logits_ptr,
    stride,
    temperature_ptr,
    limit_ptr,
    bound_ptr,
    top_ptr,
    prefix_ptr,
    weight_ptr,
    vocab,
    chunks,
    shift,
    off,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store, by their next digit, what each chunk's logits with the row's prefix weigh."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    limit = tl.load(limit_ptr + row)
    if (limit > 0) & (limit < off) & (temperature > 0.0):
        x = _load_row(logits_ptr, stride, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        key = _keys(x)
        prefix = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True)
        # Shifted twice: a shift by all 32 bits is undefined.
        matches = ((key ^ prefix) >> shift) >> 4 == 0
        if BY_MASS:
            top = _row_top(top_ptr, row, chunks, CHUNKS)
            weight = tl.exp((x - top) / temperature).to(tl.float64)
            weight = tl.where(x >= tl.load(bound_ptr + row), weight, 0.0)
        else:
            weight = tl.full((CHUNK,), 1.0, tl.float64)
        digit = ((key >> shift) & 15).to(tl.int32)
        at = (row * chunks + chunk) * _BINS
        for b in tl.static_range(_BINS):
            is_in = matches & (digit == b)
            tl.store(weight_ptr + at + b, tl.sum(tl.where(is_in, weight, 0.0), 0))


@triton.jit
def _choose_digits(
    temperature_ptr,
    limit_ptr,
    weight_ptr,
    prefix_ptr,
    target_ptr,
    bound_ptr,
    chunks,
    shift,
    off,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    BY_MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Add to each row's prefix the digit at which the greatest logits reach the target."""
    row = tl.program_id(0)
    limit = tl.load(limit_ptr + row)
    if (limit > 0) & (limit < off) & (tl.load(temperature_ptr + row) > 0.0):
        chunk = tl.arange(0, CHUNKS)[:, None]
        b = tl.arange(0, _BINS)[None, :]
        at = (row * chunks + chunk) * _BINS + b
        weight = tl.sum(tl.load(weight_ptr + at, mask=chunk < chunks, other=0.0), 0)
        digit = tl.arange(0, _BINS)
        above = tl.sum(tl.where(digit[None, :] >= digit[:, None], weight[None, :], 0.0), 1)
        if IS_FIRST:
            target = limit.to(tl.float64)
            if BY_MASS:
                target *= tl.sum(weight, 0)
            prefix = tl.full((), 0, tl.uint32)
        else:
            target = tl.load(target_ptr + row)
            prefix = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True)
        # Rounding may move the target past what there is.
        lowest = tl.min(tl.where(weight > 0.0, digit, _BINS - 1), 0)
        highest = tl.max(tl.where(weight > 0.0, digit, 0), 0)
        best = tl.max(tl.where(above >= target, digit, -1), 0)
        best = tl.minimum(tl.maximum(best, lowest), highest)
        target -= tl.sum(tl.where(digit > best, weight, 0.0), 0)
        prefix = prefix | (best.to(tl.uint32) << shift)
        tl.store(target_ptr + row, target)
        tl.store(prefix_ptr + row, prefix.to(tl.int32, bitcast=True))
        if IS_LAST:
            low = (tl.full((), 1, tl.uint32) << shift) - 1
            bits = tl.where(prefix >= _SIGN, prefix ^ _SIGN, ~(prefix | low))
            bound = tl.maximum(tl.load(bound_ptr + row), bits.to(tl.float32, bitcast=True))
            tl.store(bound_ptr + row, bound)


_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 0}
"""Low bits of a float32 that are zero where it was of this type, in whole digits."""


def bounds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    chunk: int = 4096,
) -> torch.Tensor:
    """Return the least logit that is left to each row of ``logits`` [rows, vocab], float32[rows].

    Min-p, top-k (0: off) and top-p (1: off) hold one after the other, as in
    ``sampling.distributions.target_probs``, and keep ties. ``temperature``, ``top_p`` and ``min_p``
    are float32[rows], ``top_k`` int32[rows]. A row of temperature 0 has the bound -inf.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, chunk)
    grid, columns = (rows, chunks), {"CHUNKS": triton.next_power_of_2(chunks)}
    top, least = (logits.new_empty(grid, dtype=torch.float32) for _ in range(2))
    weight = logits.new_empty((*grid, 16), dtype=torch.float64)
    prefix = logits.new_empty(rows, dtype=torch.int32)
    target = logits.new_empty(rows, dtype=torch.float64)
    bound = logits.new_empty(rows, dtype=torch.float32)
    read = (logits, logits.stride(0))
    size = (vocab, chunks)
    options = {"CHUNK": chunk, "num_warps": 8}
    _measure_tops[grid](*read, top, *size, **options)
    _find_likely[grid](*read, temperature, min_p, top, least, *size, **columns, **options)
    _start[(rows,)](temperature, min_p, least, bound, chunks, **columns, num_warps=1)
    last = _ZERO_BITS[logits.dtype]
    for limit, off, by_mass in ((top_k, vocab, False), (top_p, 1.0, True)):
        for shift in range(28, last - 1, -4):
            of_row, way = (temperature, limit), {"BY_MASS": by_mass, **columns}
            weighed = (*read, *of_row, bound, top, prefix, weight)
            _weigh_digits[grid](*weighed, *size, shift, off, **way, **options)
            arguments = (*of_row, weight, prefix, target, bound, chunks, shift, off)
            ends = {"IS_FIRST": shift == 28, "IS_LAST": shift == last}
            _choose_digits[(rows,)](*arguments, **ends, **way, num_warps=1)
    return bound
