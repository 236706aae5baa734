"""The tokens that a head proposes at a place: the likeliest to be what the target draws there, by
the draft's logits and the request's own noise (``sampling.draw.finishers``).

A row is cut into chunks, as ``draw`` cuts it: the mass of every chunk, the best of every chunk, and
the best of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.engines.cuda.draw import exponential
from backend.engines.spine import CANDIDATES
from backend.sampling.distributions import FAINT
from backend.sampling.draw import HEAD, SHARPNESS

_HEAD, _SHARPNESS, _FAINT = tl.constexpr(HEAD), tl.constexpr(SHARPNESS), tl.constexpr(FAINT)
_MOST = tl.constexpr(CANDIDATES)
_NONE = tl.constexpr(2147483647)


@triton.jit
def _load_chunk(logits_ptr, stride, bound_ptr, row, chunk, columns, CHUNK: tl.constexpr):
    """Return a chunk's columns and their logits, -inf below the row's bound."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf")
    ).to(tl.float32)
    return column, tl.where(x >= tl.load(bound_ptr + row), x, float("-inf"))


@triton.jit
def _heat_of(temperature_ptr, row):
    """Return a row's temperature and what its logits are divided by."""
    temperature = tl.load(temperature_ptr + row)
    return temperature, tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _measure(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    top_ptr,
    mass_ptr,
    columns,
    chunks,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    _, x = _load_chunk(logits_ptr, stride, bound_ptr, row, chunk, columns, CHUNK)
    _, heat = _heat_of(temperature_ptr, row)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + row * chunks + chunk, top)
    tl.store(mass_ptr + row * chunks + chunk, tl.sum(tl.exp((x - base) / heat), 0))


@triton.jit
def _best_of_chunk(
    logits_ptr,
    stride,
    temperature_ptr,
    bound_ptr,
    word_ptr,
    token_ptr,
    top_ptr,
    mass_ptr,
    worth_ptr,
    place_ptr,
    total_ptr,
    columns,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    column, x = _load_chunk(logits_ptr, stride, bound_ptr, row, chunk, columns, CHUNK)
    temperature, heat = _heat_of(temperature_ptr, row)
    other = tl.arange(0, CHUNKS)
    exists = other < chunks
    tops = tl.load(top_ptr + row * chunks + other, mask=exists, other=float("-inf"))
    masses = tl.load(mass_ptr + row * chunks + other, mask=exists, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(masses * tl.exp((tops - base) / heat), 0)
    share = tl.exp((x - base) / heat) / mass
    worth = share
    if temperature > 0.0:
        in_head = share >= _HEAD
        token = tl.load(token_ptr + row.to(tl.int64) * columns + column, mask=in_head, other=0)
        word = tl.load(word_ptr + row).to(tl.uint64, bitcast=True)
        noise = exponential(word ^ token.to(tl.uint64)).to(tl.float32)
        speed = tl.exp(tl.log(tl.where(in_head, share, 1.0) / noise) * _SHARPNESS)
        worth = tl.where(in_head, speed, 0.0)
    worth = tl.where(share == share, worth, 0.0)  # of a row without any mass
    at = row * chunks + chunk
    tl.store(total_ptr + at, tl.sum(worth, 0))
    worth = tl.where(column < columns, worth, -1.0)
    for n in tl.static_range(_MOST):
        best = tl.max(worth, 0)
        place = tl.min(tl.where(worth == best, column, _NONE), 0)
        tl.store(worth_ptr + at * _MOST + n, best)
        tl.store(place_ptr + at * _MOST + n, place)
        worth = tl.where(column == place, -1.0, worth)


@triton.jit
def _best_of_row(
    temperature_ptr,
    token_ptr,
    worth_ptr,
    place_ptr,
    total_ptr,
    best_ptr,
    chance_ptr,
    columns,
    chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    other = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(total_ptr + row * chunks + other, mask=other < chunks, other=0.0), 0)
    at = tl.arange(0, CHUNKS * _MOST)
    exists = at < chunks * _MOST
    worth = tl.load(worth_ptr + row * chunks * _MOST + at, mask=exists, other=-1.0)
    places = tl.load(place_ptr + row * chunks * _MOST + at, mask=exists, other=_NONE)
    faint = tl.where(tl.load(temperature_ptr + row) > 0.0, 0.0, tl.max(worth, 0) * _FAINT)
    for n in tl.static_range(_MOST):
        best = tl.max(worth, 0)
        place = tl.min(tl.where(worth == best, places, _NONE), 0)
        token = tl.load(
            token_ptr + row.to(tl.int64) * columns + place, mask=place < columns, other=0
        )
        is_worth = (best > 0.0) & (best >= faint)
        tl.store(best_ptr + row * _MOST + n, token)
        tl.store(chance_ptr + row * _MOST + n, tl.where(is_worth, best / total, 0.0))
        worth = tl.where(places == place, -1.0, worth)


_CHUNK = 2048
"""Columns of a program."""


def candidates(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: torch.Tensor,
    bound: torch.Tensor,
    words: torch.Tensor,
    *,
    chunk: int = _CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens int64[rows, CANDIDATES] that are likeliest to be what the target draws, the
    best first, and how likely each is, float32: 0 for a token that is not worth a node.

    ``logits`` [rows, columns] are those of ``tokens`` int64[rows, columns]. ``temperature`` and
    ``bound`` are float32[rows]: 0 is greedy, and logits below the bound have no probability.
    ``words`` int64[rows] are the bits of the noise word of (seed, position).
    """
    (rows, columns), tokens = logits.shape, tokens.contiguous()
    chunks = triton.cdiv(columns, chunk)
    top, mass, total = (logits.new_empty(rows, chunks, dtype=torch.float32) for _ in range(3))
    worth = logits.new_empty(rows, chunks, CANDIDATES, dtype=torch.float32)
    place = torch.empty_like(worth, dtype=torch.int32)
    best = tokens.new_empty(rows, CANDIDATES)
    chance = logits.new_empty(rows, CANDIDATES, dtype=torch.float32)
    row = logits, logits.stride(0), temperature, bound
    size, grid = (columns, chunks), (rows, chunks)
    of_all = {"CHUNKS": triton.next_power_of_2(chunks)}
    _measure[grid](*row, top, mass, *size, CHUNK=chunk, num_warps=8)
    bests = worth, place, total
    _best_of_chunk[grid](
        *row, words, tokens, top, mass, *bests, *size, CHUNK=chunk, **of_all, num_warps=8
    )
    _best_of_row[(rows,)](temperature, tokens, *bests, best, chance, *size, **of_all, num_warps=1)
    return best, chance
