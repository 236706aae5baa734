"""Whether a draft that takes the target's states in every pass is worth that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.01
"""Share of the steps; a draft that proposes in fewer falls asleep."""

SLEEP_AFTER_STEPS = 2000
"""Steps without a proposal after which a draft falls asleep."""

WAKE_AFTER_STEPS = 20_000
"""Steps after which it is tried again, on texts that begin then."""


@dataclass(slots=True)
class Sleep:
    """A draft that is hardly ever chosen takes no states, for its time is every pass's. A batch of
    half the rows wakes it, too: it may be chosen there.
    """

    draft: str
    unused: float = 0.0
    """Steps without a proposal, less those that the others make up for."""
    asleep_for: int = 0
    """Steps since it fell asleep, this one included; 0: it is awake."""
    rows: int = 0
    """Rows of the step in which it fell asleep."""

    def proposed(self) -> None:
        """Note that it is to propose in a step."""
        self.unused = max(0.0, self.unused - 1 / LEAST_SHARE)

    def takes(self, rows: int) -> bool:
        """Return whether it takes the states of a step of this many rows; asked once a step."""
        if self.asleep_for:
            self.asleep_for += 1
            if self.asleep_for > WAKE_AFTER_STEPS or 2 * rows <= self.rows:
                self.asleep_for, self.unused = 0, 0.0
        else:
            self.unused += 1
            if self.unused > SLEEP_AFTER_STEPS:
                self.asleep_for, self.rows = 1, rows
                text = "draft %s was chosen in fewer than %g of the steps and takes no states"
                logger.info(text, self.draft, LEAST_SHARE)
        return not self.asleep_for
