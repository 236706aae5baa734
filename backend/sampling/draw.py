"""The target draws: one token of a distribution p by a request's own noise, the same in every
engine, at any time and in any batch.

Token t takes the time E_t / p_t, E_t a standard exponential of (seed, position, t); the first to
arrive is drawn, and so follows p (the Gumbel-max trick). Draft and target race with the same noise,
so that a draft with a similar distribution mostly proposes what the target draws.

Only the head races, the tokens with p of at least ``HEAD``. The whole tail runs as one, in the time
E / (mass of the tail) with an E of its own: that is how long its fastest token would take. Only if
the tail wins do its tokens race, which is independent of when the fastest came in. So the token
follows p and is a function of distribution, seed and position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backend.sampling.randomness import TAIL, Words, exponentials

HEAD = 1e-3
"""The least probability of a token of the head, which so has at most 1000 tokens."""

SHARPNESS = 0.8
"""How a draft's race tells how likely its finishers are the target's (fitted: 0.7 to 1, ADR
0027).
"""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Heads(NamedTuple):
    """The heads of some distributions: token ``columns`` int64[q] of row ``rows`` int64[q]
    (rising), with ``masses`` float64[q].

    ``totals`` float[n] are the distributions' whole masses, 1 but for rounding.
    """

    rows: IntArray
    columns: IntArray
    masses: FloatArray
    totals: npt.NDArray[np.floating[Any]]

    @classmethod
    def of(cls, probs: torch.Tensor) -> Heads:
        """Return the heads of distributions [n, S], which sum to one; they are all that leaves the
        device.
        """
        if probs.device.type == "cpu":
            array = probs.numpy()
            rows, columns = np.divmod(np.flatnonzero(array >= HEAD), array.shape[1])
            return cls(rows, columns, array[rows, columns].astype(np.float64), array.sum(-1))
        places = (probs >= HEAD).nonzero()
        found = places.cpu().numpy()
        masses = probs[places[:, 0], places[:, 1]].double().cpu().numpy()
        return cls(found[:, 0], found[:, 1], masses, probs.sum(-1).cpu().numpy())


def draw(probs: torch.Tensor, words: Words, token_ids: IntArray | None = None) -> list[int]:
    """Return the column drawn of each of the distributions [n, S], which sum to one, by noise
    ``words`` [n].

    ``token_ids`` int64[S] are the columns' tokens (None: a column's number).
    """
    return race(Heads.of(probs), words, lambda row: probs[row].cpu().numpy(), token_ids)


def race(
    heads: Heads,
    words: Words,
    probs_of: Callable[[int], npt.NDArray[np.floating[Any]]],
    token_ids: IntArray | None = None,
) -> list[int]:
    """Return ``draw`` of distributions by their heads; ``probs_of(row)`` [S] is asked only where
    the tail wins.
    """
    times, tails, ends = _times(heads, words, token_ids)
    winners = []
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        first = start + int(times[start:end].argmin()) if start < end else -1
        rest = float(
            heads.totals[row] - heads.masses[start:end].sum()
        )  # rounding may leave it below 0
        winner = int(heads.columns[first]) if first >= 0 else -1
        if first < 0 or tails[row] < times[first] * rest:
            winner = _in_tail(probs_of(row), words[row], winner, token_ids)
        winners.append(winner)
    return winners


def finishers(
    probs: torch.Tensor, words: Words, most: int, token_ids: IntArray | None = None
) -> list[list[tuple[int, float]]]:
    """Return by row the columns that come in first in the heads' races, at most ``most``, and how
    likely each is what the target draws by the same noise, assuming its distribution is close to
    the draft's.
    """
    heads = Heads.of(probs)
    times, _, ends = _times(heads, words, token_ids)
    found = []
    for start, end in itertools.pairwise(ends):
        speeds = times[start:end] ** -SHARPNESS
        best = np.argsort(-speeds, kind="stable")[:most]
        chances = speeds[best] / max(float(speeds.sum()), 1e-300)
        found.append(list(zip(heads.columns[start + best].tolist(), chances.tolist(), strict=True)))
    return found


def _times(
    heads: Heads, words: Words, token_ids: IntArray | None
) -> tuple[FloatArray, FloatArray, Seq[int]]:
    """Return what each token of the heads takes, the tails' exponentials, and where rows begin and
    end.
    """
    tokens = heads.columns if token_ids is None else token_ids[heads.columns]
    hashed = np.concatenate((words[heads.rows] ^ tokens.astype(np.uint64), words ^ TAIL))
    times, tails = np.split(
        exponentials(hashed), [len(tokens)]
    )  # together: a call costs more than a row
    times /= heads.masses
    return times, tails, heads.rows.searchsorted(np.arange(len(words) + 1)).tolist()


def _in_tail(
    probs: npt.NDArray[np.floating[Any]], word: np.uint64, head: int, token_ids: IntArray | None
) -> int:
    """Return the column that wins among those below ``HEAD``; ``head`` where the tail was but
    rounding.

    Raises ValueError for a distribution without any probability: its logits were no numbers.
    """
    columns = np.flatnonzero((probs > 0) & (probs < HEAD))
    if not len(columns):
        if head < 0:
            raise ValueError("no token has a probability: the logits are no numbers")
        return head
    tokens = columns if token_ids is None else token_ids[columns]
    return int(columns[(exponentials(word ^ tokens.astype(np.uint64)) / probs[columns]).argmin()])
