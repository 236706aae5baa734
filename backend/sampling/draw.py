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
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backend.sampling.distributions import Floats
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
    """The heads of some distributions, token by token."""

    rows: IntArray  # [q], rising
    columns: IntArray  # [q], the tokens
    masses: FloatArray  # [q]
    totals: Floats  # [n], the distributions' whole masses, 1 but for rounding

    @classmethod
    def of(cls, distributions: Iterable[Floats]) -> Heads:
        """Return the heads of one distribution [S] or more, which sum to one."""
        columns, masses, totals = [], [], []
        for probs in distributions:
            columns.append(np.flatnonzero(probs >= HEAD))
            masses.append(probs[columns[-1]])
            totals.append(probs.sum())
        rows = np.repeat(np.arange(len(columns)), [len(head) for head in columns])
        joined = np.concatenate(masses).astype(np.float64)
        return cls(rows, np.concatenate(columns), joined, np.array(totals))


ProbsOf = Callable[[int], Floats]
"""Returns a row's distribution [S], which sums to one."""


def draw(probs_of: ProbsOf, words: Words, token_ids: IntArray | None = None) -> list[int]:
    """Return the column drawn of each row's distribution by noise ``words`` [rows].

    A row is asked again where its tail wins. ``token_ids`` int64[S] are the columns' tokens (None:
    a column's number).
    """
    return race(Heads.of(map(probs_of, range(len(words)))), words, probs_of, token_ids)


def race(
    heads: Heads,
    words: Words,  # [rows]
    probs_of: ProbsOf,
    token_ids: IntArray | None = None,  # [S]
) -> list[int]:
    """Return ``draw`` of distributions by their heads; ``probs_of`` is asked only where the tail
    wins.
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
    probs_of: ProbsOf,
    words: Words,  # [rows]
    most: int,
    token_ids: IntArray | None = None,  # [S]
) -> list[list[tuple[int, float]]]:
    """Return by row the columns that come in first in the heads' races, at most ``most``, and how
    likely each is what the target draws by the same noise, assuming its distribution is close to
    the draft's.
    """
    heads = Heads.of(map(probs_of, range(len(words))))
    times, _, ends = _times(heads, words, token_ids)
    rows = []
    for start, end in itertools.pairwise(ends):
        speeds = times[start:end] ** -SHARPNESS
        best = np.argsort(-speeds, kind="stable")[:most]
        chances = speeds[best] / max(float(speeds.sum()), 1e-300)
        rows.append(list(zip(heads.columns[start + best].tolist(), chances.tolist(), strict=True)))
    return rows


def _times(
    heads: Heads,
    words: Words,  # [rows]
    token_ids: IntArray | None,  # [S]
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
    probs: Floats,  # [S]
    word: np.uint64,
    head: int,
    token_ids: IntArray | None,  # [S]
) -> int:
    """Return the column that wins among those below ``HEAD``; ``head`` where the tail was but
    rounding.

    Raises ValueError for a distribution without any probability: its logits were no numbers.
    """
    columns = np.flatnonzero((probs > 0) & (probs < HEAD))
    if not len(columns):
        if head < 0:
            raise ValueError("no token has a probability: the logits are not numbers")
        return head
    tokens = columns if token_ids is None else token_ids[columns]
    return int(columns[(exponentials(word ^ tokens.astype(np.uint64)) / probs[columns]).argmin()])
