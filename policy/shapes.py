"""What an engine can do beyond one proposal a row, and why a plan did not ask for it.

Reasons are constants where the means are missing; where they are there but cost more than they bring, ``does not pay: 0.97`` has the gain
over the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

COHORTS, PIECES = "cohorts", "decomposition"

CHAINS_ONLY = {COHORTS: "engine runs no cohorts", PIECES: "engine does not pad"}
"""Why nothing else is planned for an engine that declares nothing."""

NO_SPECULATION = "no speculation"
NOT_MEASURED = "contention is not measured"
NOT_LONG_ENOUGH = "not yet for long enough"
ONE_ROW = "one row"
OTHER_ARM = "rows of another arm"
NOT_LONGER = "no context is longer than a block"


def does_not_pay(gain_over_cost: float) -> str:
    """Return the reason of what brings less than it costs."""
    return f"does not pay: {gain_over_cost:.2f}"


@dataclass(frozen=True, slots=True)
class Shapes:
    """Capabilities of an engine; nothing by default. Raises ValueError naming the one that is out of range.

    ``cohorts`` that can be in flight, and ``contention`` >= 1, how much longer drafting and verifying take side by side than alone (None:
    not measured). ``pads``: rows are padded to the longest context, unless it is told to cut
    contexts into pieces of whole ``block_tokens``, whose merging costs as much as reading ``merge_tokens`` cached tokens each.
    """

    cohorts: int = 1
    contention: float | None = None
    pads: bool = False
    merge_tokens: float = 0.0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("cohorts", "block_tokens"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.contention is not None and not self.contention >= 1:
            raise ValueError(f"contention must be >= 1, got {self.contention}")
        if not self.merge_tokens >= 0:
            raise ValueError(f"merge_tokens must be >= 0, got {self.merge_tokens}")
        if self.pads and self.cohorts > 1:
            raise ValueError(f"cohorts must be 1 for an engine that pads, got {self.cohorts}: the times of padded cohorts are not modelled")
