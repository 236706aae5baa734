"""A table from batch size to length, with and without a gate that closes for good.

TensorRT-LLM: ``draft_len_schedule`` (``get_draft_len_for_batch_size`` of
``_torch/speculative/utils.py``: the first key of at least the batch, beyond the last one nothing),
and ``_torch/speculative/speculation_gate.py`` with ``acceptance_rate_window_size`` and
``acceptance_rate_threshold`` (pull request 12905, documented in 1.3.0rc29). vLLM's
``num_speculative_tokens_per_batch_size`` is the table alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from policy.plan import IntArray, Outcome, Plan, Policy, View

from .entry import Baseline, same_for_all


class BatchSchedule(Policy[None]):
    """One draft, k by the requests that decode.

    ``lengths`` maps the largest batch of each range to its k; a larger one does not speculate.
    """

    def __init__(self, draft: str, lengths: Mapping[int, int]) -> None:
        if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
            raise ValueError(f"lengths must map sizes >= 1 to lengths >= 0, got {dict(lengths)}")
        self.draft, self.lengths = draft, dict(sorted(lengths.items()))

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        fitting = (k for largest, k in self.lengths.items() if len(view) <= largest)
        return same_for_all(view, self.draft, next(fitting, 0)), None


class GateState(NamedTuple):
    """The acceptance rates of the last steps that speculated, and whether the gate is closed."""

    rates: tuple[float, ...] = ()
    closed: bool = False


class GatedSchedule(Policy[GateState]):
    """The table, until the acceptance rate is too low once; then no speculation ever again.

    Each step that speculates gives one rate, accepted over proposed tokens of the whole batch. Once
    there are ``window`` of them, and their mean falls under ``percent``, the gate closes. Both must
    be set there; here they are lax, which helps: nothing of the gate can gain over the table.
    """

    def __init__(
        self, draft: str, lengths: Mapping[int, int], *, window: int = 100, percent: int = 10
    ) -> None:
        self.schedule, self.window = BatchSchedule(draft, lengths), max(window, 1)
        self.least = percent / 100

    def start(self) -> GateState:
        return GateState()

    def plan(self, view: View, state: GateState, now: float, rng: Rng) -> tuple[Plan, GateState]:
        if state.closed:
            return Plan.nothing(len(view)), state
        return self.schedule.plan(view, None, now, rng)[0], state

    def needs_ceilings(
        self,
        request: IntArray,  # [n]
        state: GateState,
    ) -> bool:
        return not state.closed

    def observe(self, outcome: Outcome, state: GateState, now: float) -> GateState:
        proposed = int(outcome.rows.length.sum())
        if state.closed or not proposed:
            return state
        accepted = np.minimum(outcome.rows.accepted, outcome.rows.length).sum()
        rates = (*state.rates, float(accepted) / proposed)[-self.window :]
        return GateState(rates, len(rates) == self.window and sum(rates) < self.least * len(rates))


ENTRIES = {
    "schedule": Baseline(
        lambda s: BatchSchedule(s.draft, s.schedule),
        "table by batch size",
        needs=("draft", "schedule"),
        colour="#b58900",
        marker="v",
    ),
    "schedule-gated": Baseline(
        lambda s: GatedSchedule(s.draft, s.schedule, **s.options),
        "table with a one-way gate",
        needs=("draft", "schedule"),
        options={"window": (100, 20), "percent": (10, 20, 30, 50)},
        colour="#76b900",
        marker="<",
    ),
}
