"""Whether a draft that takes the target's states in every pass is worth that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SLEEP_AFTER_STEPS = 2000
"""Steps for which a draft is awake at least, and over which its worth fades."""

WAKE_AFTER_STEPS = 20_000
"""Steps after which it is tried again, on texts that begin then."""


@dataclass(slots=True)
class Sleep:
    """A draft takes no states while they cost more than its proposals bring.

    Their time is every pass's, whether it proposes or not, so no plan for a step can save it. A
    batch of half the rows wakes the draft, too: it may be worth more there.
    """

    draft: str
    states_s: float = 0.0
    """Seconds for states since the last ``weigh``."""
    worth: float = 0.0
    """Accepted tokens, less what the draft's time would have brought; fading."""
    awake_for: int = 0
    """Steps since it woke."""
    asleep_for: int = 0
    """Steps since it fell asleep, this one included; 0: it is awake."""
    rows: int = 0
    """Rows of the step in which it fell asleep."""

    def weigh(self, accepted: int, proposing_s: float, price: float) -> None:
        """Count a step with the tokens that it proposed and the target accepted, its seconds for
        proposals, and the ``price`` of a second in tokens (0: unknown, only tokens count). Time
        that the target needed for its nodes is left out, so it is rather kept awake.
        """
        seconds, self.states_s = self.states_s + proposing_s, 0.0
        self.worth += accepted - price * seconds - self.worth / SLEEP_AFTER_STEPS

    def takes(self, rows: int) -> bool:
        """Return whether it takes the states of a step of this many rows; asked once a step."""
        if self.asleep_for:
            self.asleep_for += 1
            if self.asleep_for > WAKE_AFTER_STEPS or 2 * rows <= self.rows:
                self.asleep_for, self.awake_for, self.worth = 0, 0, 0.0
        else:
            self.awake_for += 1
            if self.awake_for > SLEEP_AFTER_STEPS and self.worth <= 0:
                self.asleep_for, self.rows = 1, rows
                text = "draft %s takes no states for now: they cost more than its proposals bring"
                logger.info(text, self.draft)
        return not self.asleep_for
