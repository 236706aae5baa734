"""A table from batch size to length."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.random import Generator as Rng

from policy.plan import Plan, Policy, View

from .entry import Baseline, same_for_all


class BatchSchedule(Policy[None]):
    """One draft, k by the requests that decode: TensorRT-LLM's ``draft_len_schedule``.

    ``lengths`` maps the largest batch of each range to its k; a larger one does not speculate.
    """

    def __init__(self, draft: str, lengths: Mapping[int, int]) -> None:
        if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
            raise ValueError(f"lengths must map sizes >= 1 to lengths >= 0, got {dict(lengths)}")
        self.draft, self.lengths = draft, dict(sorted(lengths.items()))

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        fitting = (k for largest, k in self.lengths.items() if len(view) <= largest)
        return same_for_all(view, self.draft, next(fitting, 0)), None


ENTRIES = {
    "schedule": Baseline(
        lambda s: BatchSchedule(s.draft, s.schedule),
        "table by batch size",
        needs=("draft", "schedule"),
        colour="#b58900",
        marker="v",
    ),
}
