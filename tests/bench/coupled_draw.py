"""The cheap exact draw, a candidate for ``backend.engines.coupling``: only the head of a law races.

Token t of a law p takes the time E_t / p_t, E_t a standard exponential of (seed, position, token).
The head are the tokens whose p is at least a threshold. The whole tail runs as one, in the time
E / (mass of the tail) with an E of its own; that is how long its fastest token would take. Only if
the tail wins does each of its tokens race, which is independent of when the fastest came in. So the
token follows p, and is a function of law, seed and position alone, whatever the threshold.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.coupling import exponentials
from backend.randomness import mix

Words = npt.NDArray[np.uint64]
"""A row's noise: ``backend.randomness.key(seed, position, Purpose.RACE)``."""

TAIL = np.uint64(2**64 - 1)
"""Stands for the tail where a token is hashed; no token has this number."""


def noise(words: Words) -> npt.NDArray[np.float64]:
    """Return the standard exponentials of hashed words, as ``coupling.exponentials`` makes them."""
    uniforms = ((mix(words) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(uniforms))


def draw(laws: npt.NDArray[np.floating], words: Words, threshold: float) -> npt.NDArray[np.int64]:
    """Return the token of each row of ``laws`` [rows, vocab] (any positive mass) by ``words``."""
    entrants = np.flatnonzero(laws >= threshold)
    rows, tokens = np.divmod(entrants, laws.shape[1])
    masses = laws.reshape(-1)[entrants].astype(np.float64)
    hashed = np.concatenate((words[rows] ^ tokens.astype(np.uint64), words ^ TAIL))
    times, tails = np.split(noise(hashed), [len(tokens)])  # together: a call costs more than a row
    times /= masses
    totals = laws.sum(-1)
    winners = np.empty(len(laws), np.int64)
    ends = rows.searchsorted(np.arange(len(laws) + 1)).tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        first = start + times[start:end].argmin() if start < end else -1
        rest = totals[row] - masses[start:end].sum()  # rounding may leave it below 0
        winners[row] = tokens[first] if first >= 0 else -1
        if first < 0 or tails[row] < times[first] * rest:
            winners[row] = in_tail(laws[row], words[row], threshold, winners[row])
    return winners


def in_tail(law: npt.NDArray[np.floating], word: np.uint64, threshold: float, head: int) -> int:
    """Return who wins among the tokens below the threshold; ``head`` if the tail was rounding."""
    tokens = np.flatnonzero((law > 0) & (law < threshold))
    if not len(tokens):
        return head
    return int(tokens[(noise(word ^ tokens.astype(np.uint64)) / law[tokens]).argmin()])


def draw_torch(laws: torch.Tensor, words: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return what ``draw`` does with tensors of any device; ``words`` [rows] are int64."""
    count, vocab = laws.shape
    entrants = (laws >= threshold).view(-1).nonzero()[:, 0]
    rows, tokens = entrants // vocab, entrants % vocab
    masses = laws.view(-1)[entrants].double()
    times = exponentials(words[rows], tokens) / masses
    best = masses.new_full((count,), torch.inf).scatter_reduce_(0, rows, times, "amin")
    won = times == best[rows]
    winners = torch.full((count,), -1, device=laws.device).index_put_((rows[won],), tokens[won])
    rest = laws.sum(-1).double().index_add_(0, rows, masses, alpha=-1)
    minus_one = torch.full_like(words, -1)
    early = exponentials(words, minus_one) < best * rest
    for row in early.nonzero()[:, 0].tolist():
        inside = ((laws[row] > 0) & (laws[row] < threshold)).nonzero()[:, 0]
        if len(inside):
            times = exponentials(words[row], inside) / laws[row, inside]
            winners[row] = inside[times.argmin()]
    return winners
