"""Plan-invariant sampling: a request's own noise, keyed by seed, position and token, makes a token of any law, whoever asks and when.

Token t of a law p runs a race in the time E_t / p_t, E_t a standard exponential; the winner is distributed as p. (With G = -log E this is
the Gumbel-max trick, arg max of log p + G.) Target and draft race with the same noise, so that a draft with a similar law mostly proposes
what the target emits; verification is then equality, and no text depends on what was proposed.
"""

from __future__ import annotations

import numpy as np
import torch

from backend.engines.processing import Columns
from backend.randomness import Purpose, key

_FEW = 4  # fewer than one column in so many can be drawn: few enough to pick them out
_SAMPLE = 512  # columns that tell which
_GOLDEN, _FIRST, _SECOND = (int(np.uint64(word).astype(np.int64)) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def winner(law: torch.Tensor, seed: int, position: int, columns: Columns) -> int:
    """Return the column that wins the race of ``law`` [S] (any positive mass), for the token at ``position``."""
    entrants, times = _race(law, seed, position, columns)
    return int(entrants[times.argmin()])


def fastest(law: torch.Tensor, seed: int, position: int, columns: Columns, count: int) -> list[int]:
    """Return the columns that come in first in that race, at most ``count`` of them."""
    entrants, times = _race(law, seed, position, columns)
    best = times.topk(min(count, len(times)), largest=False)
    found: list[int] = entrants[best.indices[best.values.isfinite()]].tolist()
    return found


def _race(law: torch.Tensor, seed: int, position: int, columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns, all that can be drawn among them, and the time that each takes: forever where it cannot.

    On a processor a few are picked out first. Of most of the vocabulary that takes longer than to let all run, and a GPU would wait for it.
    """
    word, some = int(key(seed, position, Purpose.RACE).astype(np.int64)), law[:: 1 + len(law) // _SAMPLE]
    if law.device.type == "cpu" and _FEW * int(some.count_nonzero()) < len(some):
        entrants = law.nonzero()[:, 0]
        tokens = entrants if columns.token_ids is None else columns.token_ids[entrants].long()
        return entrants, exponentials(word, tokens) / law[entrants]
    entrants = torch.arange(len(law), device=law.device)
    times = exponentials(word, entrants if columns.token_ids is None else columns.token_ids.long()) / law
    return entrants, times.masked_fill_(law == 0, torch.inf)


def exponentials(word: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return a standard exponential for each token id (int64) in float64, from 53 random bits: SplitMix64 of ``word`` xor token."""
    mixed = tokens ^ word
    spare = torch.empty_like(mixed)
    mixed += _GOLDEN  # int64 arithmetic is modulo 2**64; only the shifts must be made logical
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(mixed, shift, out=spare)
        mixed ^= spare.bitwise_and_((1 << (64 - shift)) - 1)
        mixed *= factor
    mixed.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return -torch.log((mixed.double() + 0.5) * 2.0**-53)
