"""The draw of ``backend/sampling/draw.py`` on the device: the same function of logits and noise.

A row's vocabulary is cut into chunks of fixed length, so that one row fills the device, too. Four
kernels follow each other: the greatest logit and the mass of every chunk, and which of its tokens
may be of the head; the race of those that are, and the tail mass; for rows whose tail wins, the
race of the tail tokens; and the winner over all chunks. Only the first one, and the third where the
tail wins, read all logits. Rows of temperature 0 take the first greatest logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.sampling.draw import HEAD

_HEAD = tl.constexpr(HEAD)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_NONE = tl.constexpr(2147483647)
_SLACK = tl.constexpr(0.999)
_MOST_CANDIDATES = 1024
_BLOCK = tl.constexpr(256)


@triton.jit
def exponential(word):
    """Return a standard exponential of 53 bits of SplitMix64's finaliser."""
    x = word + _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    x = x ^ (x >> 31)
    return -tl.log(((x >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16)


@triton.jit
def _measure_chunks(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    top_ptr,
    place_ptr,
    mass_ptr,
    count_ptr,
    candidate_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store the greatest logit, its place and the mass of a chunk, and its candidates: tokens of at
    least ``HEAD`` of the chunk's mass, for the head has no others.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    offset = tl.arange(0, CHUNK)
    column = chunk * CHUNK + offset
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf")
    ).to(tl.float32)
    is_broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    top = tl.where(is_broken, float("inf"), tl.max(x, 0))
    place = tl.min(tl.where((x == top) & (column < vocab), column, _NONE), 0)
    at = row * chunks + chunk
    tl.store(top_ptr + at, top)
    tl.store(place_ptr + at, tl.where(is_broken, -1, place))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp((x - base) / temperature)
        weight = tl.where(x >= tl.load(bound_ptr + row), weight, 0.0).to(tl.float64)
        mass = tl.sum(weight, 0)
        tl.store(mass_ptr + at, mass)
        is_candidate = (weight > 0.0) & (weight >= mass * (_SLACK * _HEAD))
        place_of = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        to = candidate_ptr + at.to(tl.int64) * MOST + place_of
        tl.store(to, offset.to(tl.int16), mask=is_candidate & (place_of < MOST))
        tl.store(count_ptr + at, tl.sum(is_candidate.to(tl.int32), 0))


@triton.jit
def _combine(top_ptr, mass_ptr, row, temperature, chunks, CHUNKS: tl.constexpr):
    """Return a row's greatest logit and its whole mass relative to that."""
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    masses = tl.load(mass_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(tops, 0)
    scale = tl.where(tops == float("-inf"), 0.0, tl.exp((tops - top) / temperature))
    return top, tl.sum(masses * scale.to(tl.float64), 0)


@triton.jit
def _weigh(x, bound, base, temperature):
    """Return weights relative to the logit ``base``."""
    return tl.where(x >= bound, tl.exp((x - base) / temperature), 0.0)


@triton.jit
def _base_of(top_ptr, at, top, temperature):
    """Return a chunk's greatest logit and its weight."""
    logit = tl.load(top_ptr + at)
    base = tl.where(logit == float("-inf"), 0.0, logit)
    return base, tl.where(logit == float("-inf"), 0.0, tl.exp((logit - top) / temperature))


@triton.jit
def _race_heads(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    word_ptr,
    top_ptr,
    mass_ptr,
    count_ptr,
    candidate_ptr,
    time_ptr,
    winner_ptr,
    tail_ptr,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    top, mass = _combine(top_ptr, mass_ptr, row, temperature, chunks, CHUNKS)
    word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
    bound = tl.load(bound_ptr + row)
    at = row * chunks + chunk
    base, scale = _base_of(top_ptr, at, top, temperature)
    logits = logits_ptr + row.to(tl.int64) * stride + chunk * CHUNK
    candidates = candidate_ptr + at.to(tl.int64) * MOST
    count = tl.load(count_ptr + at)
    least = tl.full((), float("inf"), tl.float64)
    winner = tl.full((), _NONE, tl.int32)
    head = tl.full((), 0.0, tl.float64)
    for begin in range(0, count, _BLOCK):
        n = begin + tl.arange(0, _BLOCK)
        exists = n < count
        offset = tl.load(candidates + n, mask=exists, other=0).to(tl.int32)
        x = tl.load(logits + offset, mask=exists, other=float("-inf")).to(tl.float32)
        own_weight = _weigh(x, bound, base, temperature)
        weight = own_weight * scale
        in_head = exists & (weight.to(tl.float64) >= mass * _HEAD)
        head += tl.sum(tl.where(in_head, own_weight, 0.0).to(tl.float64), 0)
        column = chunk * CHUNK + offset
        noise = exponential(word ^ column.to(tl.uint64))
        time = tl.where(in_head, noise / tl.where(in_head, weight, 1.0), float("inf"))
        block_least = tl.min(time, 0)
        first = tl.min(tl.where((time == block_least) & in_head, column, _NONE), 0)
        winner = tl.where(block_least < least, first, winner)
        least = tl.minimum(block_least, least)
    tail = tl.load(mass_ptr + at) - head
    tl.store(tail_ptr + at, tl.maximum(tail, 0.0) * scale.to(tl.float64) / mass)
    tl.store(time_ptr + at, least * mass)
    tl.store(winner_ptr + at, winner)


@triton.jit
def _tail_wins(time_ptr, tail_ptr, word, row, chunks, CHUNKS: tl.constexpr):
    """Return the least time of a row's head, and whether its tail comes in earlier."""
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < chunks
    least = tl.min(tl.load(time_ptr + row * chunks + chunk, mask=exists, other=float("inf")), 0)
    tail = tl.sum(tl.load(tail_ptr + row * chunks + chunk, mask=exists, other=0.0), 0)
    tail_word = tl.full((1,), 0xFFFFFFFFFFFFFFFF, tl.uint64) ^ word
    return least, tl.sum(exponential(tail_word), 0) < least * tail


@triton.jit
def _race_tails(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    word_ptr,
    top_ptr,
    mass_ptr,
    time_ptr,
    tail_ptr,
    tail_time_ptr,
    tail_winner_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
    _, tail_wins = _tail_wins(time_ptr, tail_ptr, word, row, chunks, CHUNKS)
    if tail_wins:
        top, mass = _combine(top_ptr, mass_ptr, row, temperature, chunks, CHUNKS)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(
            logits_ptr + row.to(tl.int64) * stride + column,
            mask=column < vocab,
            other=float("-inf"),
        ).to(tl.float32)
        base, scale = _base_of(top_ptr, row * chunks + chunk, top, temperature)
        weight = _weigh(x, tl.load(bound_ptr + row), base, temperature) * scale
        in_tail = (weight > 0.0) & (weight.to(tl.float64) < mass * _HEAD)
        noise = exponential(word ^ column.to(tl.uint64))
        time = tl.where(in_tail, noise / tl.where(in_tail, weight, 1.0), float("inf"))
        least = tl.min(time, 0)
        at = row * chunks + chunk
        tl.store(tail_time_ptr + at, least)
        tl.store(tail_winner_ptr + at, tl.min(tl.where(time == least, column, _NONE), 0))


@triton.jit
def _pick(
    temperature_ptr,
    word_ptr,
    top_ptr,
    place_ptr,
    time_ptr,
    winner_ptr,
    tail_ptr,
    tail_time_ptr,
    tail_winner_ptr,
    token_ptr,
    chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < chunks
    at = row * chunks + chunk
    tops = tl.load(top_ptr + at, mask=exists, other=float("-inf"))
    places = tl.load(place_ptr + at, mask=exists, other=_NONE)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, places, _NONE), 0)
    token = tl.where(top == float("-inf"), -1, token)
    if (token >= 0) & (tl.load(temperature_ptr + row) > 0.0):
        word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
        least, tail_wins = _tail_wins(time_ptr, tail_ptr, word, row, chunks, CHUNKS)
        times = tl.load(time_ptr + at, mask=exists, other=float("inf"))
        winners = tl.load(winner_ptr + at, mask=exists, other=_NONE)
        winner = tl.min(tl.where(times == least, winners, _NONE), 0)
        if tail_wins:
            tail_times = tl.load(tail_time_ptr + at, mask=exists, other=float("inf"))
            tail_winners = tl.load(tail_winner_ptr + at, mask=exists, other=_NONE)
            tail_least = tl.min(tail_times, 0)
            if tail_least < float("inf"):  # else the tail was but rounding
                winner = tl.min(tl.where(tail_times == tail_least, tail_winners, _NONE), 0)
        token = winner
    tl.store(token_ptr + row, tl.where(token == _NONE, -1, token))


CHUNK = 4096
"""Columns of a program."""


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    bound: torch.Tensor,
    words: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return the tokens int32[rows] drawn from ``logits`` [rows, vocab]; -1 for a row with a NaN or
    an infinity, or all of minus infinity.

    ``temperature`` and ``bound`` are float32[rows]: logits below the bound have no probability
    (-inf: all have). ``words`` int64[rows] are the bits of the noise word of (seed, position).
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, chunk)
    grid, columns = (rows, chunks), {"CHUNKS": triton.next_power_of_2(chunks)}
    shape = (logits, logits.stride(0), temperature, bound)
    top = logits.new_empty(grid, dtype=torch.float32)
    mass, time, tail, tail_time = (logits.new_empty(grid, dtype=torch.float64) for _ in range(4))
    place, winner, tail_winner, count = (
        logits.new_empty(grid, dtype=torch.int32) for _ in range(4)
    )
    most = min(chunk, _MOST_CANDIDATES)
    candidates = logits.new_empty((*grid, most), dtype=torch.int16)
    tokens = logits.new_empty(rows, dtype=torch.int32)
    size = (vocab, chunks)
    options = {"CHUNK": chunk, "num_warps": 8}
    heads = (count, candidates)
    _measure_chunks[grid](*shape, top, place, mass, *heads, *size, MOST=most, **options)
    masses, of_heads, of_tails = (words, top, mass), (time, winner, tail), (tail_time, tail_winner)
    first = options | columns | {"num_warps": 4}
    _race_heads[grid](*shape, *masses, *heads, *of_heads, chunks, MOST=most, **first)
    _race_tails[grid](*shape, *masses, time, tail, *of_tails, *size, **columns, **options)
    arguments = (temperature, words, top, place, *of_heads, *of_tails, tokens)
    _pick[(rows,)](*arguments, chunks, **columns, num_warps=1)
    return tokens
