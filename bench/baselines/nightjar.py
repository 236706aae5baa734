"""Nightjar (arXiv 2512.22420v3): a bandit over lengths by batch size, off included.

Its planner. The paper's full text was not at hand: its abstract, a public summary of its equations
and algorithm (ADA-BINGREEDY), and a public fork of vLLM that has them were. These two differ in the
chance of a trial, 1 / b or 1 / sqrt(b) in bin b; the smaller one is taken, which helps. Taking the
draft out of memory, Nightjar's other half, is not modelled. Batches of one range (1, 2, 3 to 4, 5
to 8, ...) share what they learn here, which helps: there each batch size learns alone. Switching on
adds C / k seconds, C being the time of the draft's catch-up: here by its table and the tokens that
it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from policy.baselines import Baseline, same_for_all
from policy.latency import LatencyModel
from policy.plan import FloatArray, Outcome, Plan, Policy, View


class Trials(NamedTuple):
    """One range of batches: estimates for each length, and the state of its trials.

    Block j has 2^(j - 1) steps, in bins of as many steps as its square root; a bin has one length.
    """

    tokens: FloatArray  # [lengths]
    seconds: FloatArray  # [lengths]
    block: int = 1
    place: int = 0  # of the bin in its block
    steps_left: int = 0  # steps of the bin
    length: int = 0

    def next_bin(self) -> Trials:
        """Return the trials at the next bin, its length not chosen yet."""
        steps = 2 ** (self.block - 1)
        block, at = self.block, self.place + 1
        if (at - 1) * isqrt(steps) >= steps:
            block, at = block + 1, 1
        return self._replace(block=block, place=at, steps_left=isqrt(2 ** (block - 1)))


class NightjarState(NamedTuple):
    """Estimates by range of batches, and the range and the length of the last step."""

    trials: Mapping[int, Trials]
    batches: int = 0
    length: int = 0


class Nightjar(Policy[NightjarState]):
    """One draft; a length from 0 to ``length`` for the whole batch, by seconds a token.

    Bin b of a block takes a random length with probability 1 / b, else
    the one of the least seconds a token; what has not been tried is no candidate. After a step
    without speculation a length k > 0 counts for more seconds: those of switching on.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        k_max: int,
        *,
        draft: str,
        length: int,
    ) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        self.draft, self.most = draft, length
        self._curve = latency.drafts[drafts.index(draft)]

    def start(self) -> NightjarState:
        return NightjarState({})

    def plan(
        self, view: View, state: NightjarState, now: float, rng: Rng
    ) -> tuple[Plan, NightjarState]:
        batches = max(len(view) - 1, 0).bit_length()
        none = np.zeros(self.most + 1)
        trials = state.trials.get(batches, Trials(none, none))
        if not trials.steps_left:
            trials = trials.next_bin()
            tries = rng.random() < 1 / trials.place or not trials.tokens.any()
            trial, best = int(rng.integers(self.most + 1)), self._best(view, trials, state.length)
            trials = trials._replace(length=trial if tries else best)
        trials = trials._replace(steps_left=trials.steps_left - 1)
        after = NightjarState({**state.trials, batches: trials}, batches, trials.length)
        return same_for_all(view, self.draft, trials.length), after

    def observe(self, outcome: Outcome, state: NightjarState, now: float) -> NightjarState:
        trials = state.trials.get(state.batches)
        if trials is None or not len(outcome.rows):
            return state
        tokens, seconds = trials.tokens.copy(), trials.seconds.copy()
        tokens[state.length] += outcome.rows.emitted.sum()
        seconds[state.length] += outcome.times.measured_s
        learnt = trials._replace(tokens=tokens, seconds=seconds)
        return state._replace(trials={**state.trials, state.batches: learnt})

    def _best(self, view: View, trials: Trials, last: int) -> int:
        """Return the length of the least seconds a token, switching on counted."""
        tried = trials.tokens > 0
        token_s = np.where(tried, trials.seconds / np.maximum(trials.tokens, 1), np.inf)
        if last == 0:
            lacking = view.catchup[:, view.drafts.index(self.draft)]
            tokens, rows = int(np.maximum(lacking, 1).sum()), len(view)
            catchup_s = self._curve.seconds(tokens, rows) - self._curve.seconds(rows, rows)
            token_s[1:] += catchup_s / np.arange(1, self.most + 1)
        return int(token_s.argmin())


ENTRIES = {
    "nightjar": Baseline.by_path(
        Nightjar,
        "Nightjar",
        needs=("draft", "length"),
        colour="#4b4e9b",
        marker="p",
    ),
}
