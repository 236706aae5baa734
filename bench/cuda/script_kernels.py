"""The script's kernels, in Triton: a launch for each place of a proposal and one for each draw, so
that they add next to nothing to what is measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.engines.spine import CANDIDATES

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_TEXT = tl.constexpr(0x5851F42D4C957F2D)
_OTHER = tl.constexpr(0x2545F4914F6CDD1D)
_BLOCK = tl.constexpr(128)


@triton.jit
def _mix(word):
    word = word + _GOLDEN
    word = (word ^ (word >> 30)) * _FIRST
    word = (word ^ (word >> 27)) * _SECOND
    return word ^ (word >> 31)


@triton.jit
def _token(seed, place, vocab):
    """Return the text's token; the modulus is that of Python, for a signed number."""
    token = (_mix(seed ^ place ^ _TEXT).to(tl.int64, bitcast=True) >> 1) % vocab
    return tl.where(token < 0, token + vocab, token)


@triton.jit
def _uniform(seed, place, what):
    bits = _mix(_mix(seed + what * _OTHER) ^ place)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _write_tokens(seed_ptr, place_ptr, token_ptr, count, vocab):
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    exists = at < count
    seed = tl.load(seed_ptr + at, mask=exists, other=0).to(tl.uint64, bitcast=True)
    place = tl.load(place_ptr + at, mask=exists, other=0).to(tl.uint64, bitcast=True)
    tl.store(token_ptr + at, _token(seed, place, vocab).to(tl.int32), mask=exists)


@triton.jit
def _write_choices(
    seed_ptr,
    place_ptr,
    token_ptr,
    chance_ptr,
    count,
    number,
    vocab,
    even,
    odd,
    hard_share,
    second_share,
    MOST: tl.constexpr,
):
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    exists = at < count
    seed = tl.load(seed_ptr + at, mask=exists, other=0).to(tl.uint64, bitcast=True)
    place = tl.load(place_ptr + at, mask=exists, other=0).to(tl.uint64, bitcast=True)
    rate = tl.where((seed & 1) == 0, even, odd).to(tl.float64)
    zero = tl.zeros((_BLOCK,), tl.uint64)
    rate = tl.where(_uniform(seed, place, zero) < hard_share, 0.5 * rate, rate)
    second = (1.0 - rate) * second_share
    coin = _uniform(seed, place, zero + number)
    rank = tl.where(coin < rate, 0, tl.where(coin < rate + second, 1, MOST))
    right = _token(seed, place, vocab)
    rest = (1.0 - rate - second) * 0.1
    for n in tl.static_range(MOST):
        token = (right + n - rank) % vocab
        token = tl.where(token < 0, token + vocab, token)
        chance = rate if n == 0 else (second if n == 1 else (rest if n == 2 else 0.5 * rest))
        tl.store(token_ptr + at * MOST + n, token, mask=exists)
        tl.store(chance_ptr + at * MOST + n, chance.to(tl.float32), mask=exists)


def tokens(seed: torch.Tensor, place: torch.Tensor, vocab: int) -> torch.Tensor:
    """As ``script.tokens_of``, int32."""
    out = torch.empty(len(place), dtype=torch.int32, device=place.device)
    _write_tokens[(triton.cdiv(len(place), 128),)](seed, place, out, len(place), vocab)
    return out


def choices(
    seed: torch.Tensor,
    place: torch.Tensor,
    number: int,
    rates: tuple[float, float],
    shares: tuple[float, float],
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``script.choices_of``; ``shares`` are those of hard places and of second nodes."""
    token = torch.empty(len(place), CANDIDATES, dtype=torch.int64, device=place.device)
    chance = torch.empty(len(place), CANDIDATES, device=place.device)
    _write_choices[(triton.cdiv(len(place), 128),)](
        seed, place, token, chance, len(place), number, vocab, *rates, *shares, MOST=CANDIDATES
    )
    return token, chance
