"""The draw of ``backend/sampling/draw.py`` on the device: the same function of logits and noise.

A row's vocabulary is cut into chunks of fixed length, so that one row fills the device, too. Four
kernels follow each other: the greatest logit and the mass of every chunk; the race of its head
tokens and its tail mass; for rows whose tail wins, the race of the tail tokens; and the winner over
all chunks. Rows of temperature 0 take the first greatest logit.
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


@triton.jit
def _exponential(word):
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
    vocab,
    chunks,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf")
    ).to(tl.float32)
    is_broken = tl.max((x != x).to(tl.int32), 0) > 0
    top = tl.where(is_broken, float("inf"), tl.max(x, 0))
    place = tl.min(tl.where((x == top) & (column < vocab), column, _NONE), 0)
    at = row * chunks + chunk
    tl.store(top_ptr + at, top)
    tl.store(place_ptr + at, tl.where(is_broken, -1, place))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp((x - base) / temperature)
        weight = tl.where(x >= tl.load(bound_ptr + row), weight, 0.0)
        tl.store(mass_ptr + at, tl.sum(weight.to(tl.float64), 0))


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
def _race_heads(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    word_ptr,
    top_ptr,
    mass_ptr,
    time_ptr,
    winner_ptr,
    tail_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    top, mass = _combine(top_ptr, mass_ptr, row, temperature, chunks, CHUNKS)
    word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf")
    ).to(tl.float32)
    weight = tl.where(x >= tl.load(bound_ptr + row), tl.exp((x - top) / temperature), 0.0)
    in_head = weight.to(tl.float64) >= _HEAD * mass
    at = row * chunks + chunk
    tl.store(tail_ptr + at, tl.sum(tl.where(in_head, 0.0, weight).to(tl.float64), 0) / mass)
    if tl.max(in_head.to(tl.int32), 0) > 0:
        noise = _exponential(word ^ column.to(tl.uint64))
        time = tl.where(in_head, noise / tl.where(in_head, weight, 1.0), float("inf"))
        least = tl.min(time, 0)
        tl.store(time_ptr + at, least * mass)
        tl.store(winner_ptr + at, tl.min(tl.where(time == least, column, _NONE), 0))
    else:
        tl.store(time_ptr + at, float("inf"))
        tl.store(winner_ptr + at, _NONE)


@triton.jit
def _tail_wins(time_ptr, tail_ptr, word, row, chunks, CHUNKS: tl.constexpr):
    """Return the least time of a row's head, and whether its tail comes in earlier."""
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < chunks
    least = tl.min(tl.load(time_ptr + row * chunks + chunk, mask=exists, other=float("inf")), 0)
    tail = tl.sum(tl.load(tail_ptr + row * chunks + chunk, mask=exists, other=0.0), 0)
    tail_word = tl.full((1,), 0xFFFFFFFFFFFFFFFF, tl.uint64) ^ word
    return least, tl.sum(_exponential(tail_word), 0) < least * tail


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
        weight = tl.where(x >= tl.load(bound_ptr + row), tl.exp((x - top) / temperature), 0.0)
        in_tail = (weight > 0.0) & (weight.to(tl.float64) < _HEAD * mass)
        noise = _exponential(word ^ column.to(tl.uint64))
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
    if (token >= 0) & (tl.load(temperature_ptr + row) > 0.0):
        word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
        least, tail_wins = _tail_wins(time_ptr, tail_ptr, word, row, chunks, CHUNKS)
        times = tl.load(time_ptr + at, mask=exists, other=float("inf"))
        winners = tl.load(winner_ptr + at, mask=exists, other=_NONE)
        drawn = tl.min(tl.where(times == least, winners, _NONE), 0)
        if tail_wins:
            tail_times = tl.load(tail_time_ptr + at, mask=exists, other=float("inf"))
            tail_winners = tl.load(tail_winner_ptr + at, mask=exists, other=_NONE)
            tail_least = tl.min(tail_times, 0)
            if tail_least < float("inf"):  # else the tail was but rounding
                drawn = tl.min(tl.where(tail_times == tail_least, tail_winners, _NONE), 0)
        token = drawn
    tl.store(token_ptr + row, tl.where(token == _NONE, -1, token))


class Draw:
    """Buffers for the chunks of at most ``rows`` rows of ``vocab`` logits, and the launches."""

    def __init__(
        self, rows: int, vocab: int, device: str | torch.device, *, chunk: int = 4096
    ) -> None:
        self.vocab, self.chunk = vocab, chunk
        self.chunks = -(-vocab // chunk)
        shape = (rows, self.chunks)
        self._top = torch.empty(shape, device=device)
        self._mass, self._time, self._tail, self._tail_time = (
            torch.empty(shape, dtype=torch.float64, device=device) for _ in range(4)
        )
        self._place, self._winner, self._tail_winner = (
            torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3)
        )

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        bound: torch.Tensor,
        words: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Write the tokens drawn from ``logits`` [rows, vocab] into ``tokens`` int32[rows].

        ``temperature`` and ``bound`` are float32[rows]: logits below the bound have no probability
        (-inf: all have). ``words`` int64[rows] are the bits of the noise word of (seed, position).
        A row with a NaN draws -1.
        """
        rows = logits.shape[0]
        grid, stride = (rows, self.chunks), logits.stride(0)
        shape = {"CHUNKS": triton.next_power_of_2(self.chunks)}
        row = (logits, stride, temperature, bound)
        size = (self.vocab, self.chunks)
        _measure_chunks[grid](
            *row, self._top, self._place, self._mass, *size, CHUNK=self.chunk, num_warps=8
        )
        _race_heads[grid](
            *row,
            words,
            self._top,
            self._mass,
            self._time,
            self._winner,
            self._tail,
            *size,
            CHUNK=self.chunk,
            **shape,
            num_warps=8,
        )
        _race_tails[grid](
            *row,
            words,
            self._top,
            self._mass,
            self._time,
            self._tail,
            self._tail_time,
            self._tail_winner,
            *size,
            CHUNK=self.chunk,
            **shape,
            num_warps=8,
        )
        _pick[(rows,)](
            temperature,
            words,
            self._top,
            self._place,
            self._time,
            self._winner,
            self._tail,
            self._tail_time,
            self._tail_winner,
            tokens,
            self.chunks,
            **shape,
            num_warps=1,
        )
        return tokens
