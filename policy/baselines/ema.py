"""SGLang's ``--speculative-adaptive``: a moving average of accepted tokens moves the length.

``python/sglang/srt/speculative/adaptive_spec_params.py`` and ``adaptive_step_router.py`` (read at
015c872 and a12239f), off by default. Candidates by batch, its tiers, are those of release 0.5.23;
pull request 21599 began with one list for every batch. Batches are not padded to captured sizes
here, which helps.

The average moves with each step's mean by 0.2; every 5 steps after 10, the length falls to the next
candidate c below while the average is at most c - 0.5 - 0.25 (0.5 above c = 0, and no 0.25 for
ranges that may switch off), or rises while it is over the present length - 0.5. After an interval
of 0 it probes the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from numpy.random import Generator as Rng

from policy.plan import Outcome, Plan, Policy, View

from .entry import Baseline, same_for_all

Candidates = Mapping[int, Sequence[int]]
"""Lengths by the smallest batch of each range, from 1."""
TIERS: Candidates = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
ONE_LIST: Candidates = {1: (1, 3, 7)}
_RATE, _EVERY_STEPS, _WARM_UP_STEPS = 0.2, 5, 10


class EmaState(NamedTuple):
    """One batch range's length, the average of accepted tokens, and the steps it has seen."""

    length: int
    accepted: float
    steps: int = 0


EmaStates = dict[int, EmaState]
"""By the smallest batch of each range."""


class AcceptanceEma(Policy[EmaStates]):
    """A moving average of accepted tokens moves the length of one draft among the candidates of a
    range of batches.
    """

    def __init__(self, draft: str, candidates: Candidates = TIERS) -> None:
        self.draft, self._candidates = draft, candidates

    def start(self) -> EmaStates:
        """Return a state for each batch range, in the middle of its candidates."""
        middle = {batch: lengths[len(lengths) // 2] for batch, lengths in self._candidates.items()}
        return {batch: EmaState(length, length - 1.0) for batch, length in middle.items()}

    def plan(self, view: View, state: EmaStates, now: float, rng: Rng) -> tuple[Plan, EmaStates]:
        length = state[self._range(len(view))].length
        return same_for_all(view, self.draft, length), state

    def observe(self, outcome: Outcome, state: EmaStates, now: float) -> EmaStates:
        if not len(outcome.rows):
            return state
        batch = self._range(len(outcome.rows))
        length, accepted, steps = state[batch]
        if length > 0:
            accepted += _RATE * (float(outcome.rows.accepted.mean()) - accepted)
        after, since = EmaState(length, accepted, steps + 1), steps + 1 - _WARM_UP_STEPS
        if since > 0 and since % _EVERY_STEPS == 0:
            after = _move(after, self._candidates[batch])
        return {**state, batch: after}

    def _range(self, batch: int) -> int:
        """Return the smallest batch of the range that a batch is in."""
        return max((smallest for smallest in self._candidates if smallest <= batch), default=1)


def _move(state: EmaState, lengths: Sequence[int]) -> EmaState:
    """Return the state at the candidate that its average asks for."""
    at, last = lengths.index(state.length), len(lengths) - 1
    if state.length == 0:
        probe = lengths[min(1, last)]
        accepted = state.accepted if state.accepted >= 0 else max(probe - 1.0, 0.0)
        return state._replace(length=probe, accepted=accepted)
    slack = 0.0 if lengths[0] == 0 else 0.25
    lower = at
    while lower > 0 and state.accepted <= max(lengths[lower - 1], 1) - 0.5 - slack:
        lower -= 1
    while lower == at < last and state.accepted > lengths[at] - 0.5:
        at = lower = at + 1
    return state._replace(length=lengths[lower])


ENTRIES = {
    "ema": Baseline(
        lambda s: AcceptanceEma(s.draft),
        "SGLang's tiers",
        needs=("draft",),
        colour="#2a8a57",
        marker="^",
    ),
    "ema-flat": Baseline(
        lambda s: AcceptanceEma(s.draft, ONE_LIST),
        "acceptance EMA",
        needs=("draft",),
        colour="#7fb069",
        marker="1",
    ),
}
