"""What the target has been given and has not yet answered."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from backend.core.isolation import run_again, run_turns
from backend.engines.port import Completion, Engine, Turn
from backend.ops.stats import StepStats
from backend.speculation.cycle import Step

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Submission:
    """A batch that the target verifies at once: the rows of a step, and chunks of prompts."""

    step: Step
    turns: list[Turn]


class InFlight:
    """Submits to a step engine, which runs only while it is waited for, and takes back."""

    def __init__(self, target: Engine, stats: StepStats) -> None:
        self.ids: set[int] = set()
        """The sequences in flight."""
        self._target = target
        self._stats = stats
        self._submitted: deque[Submission] = deque()

    def __len__(self) -> int:
        return len(self._submitted)

    def submit(self, submission: Submission) -> None:
        """Take a submission, which the target begins when it is to be collected."""
        self.ids.update(turn.sequence.id for turn in submission.turns)
        self._submitted.append(submission)

    def collect(self) -> tuple[Submission, list[Completion], bool]:
        """Wait for the submission; return it, its completions, and whether the target failed with
        all of them.

        A target that raises fails only the turns that raise again alone.
        """
        submission = self._submitted.popleft()
        self.ids.difference_update(turn.sequence.id for turn in submission.turns)
        log = submission.step.log
        try:
            with log.part("verify"):
                return submission, run_turns(self._target, submission.turns), False
        except Exception:
            logger.exception("the target failed; its submission is run again without proposals")
        self._stats.fallback("target_error")
        submission.step.proposals.clear()
        with log.part("verify"):
            completions = run_again(self._target, submission.turns) if submission.turns else []
        return (
            submission,
            completions,
            bool(completions) and all(completion.error is not None for completion in completions),
        )

    def forget(self, sequence_id: int) -> bool:
        """Take a sequence out; return whether its turn was in flight."""
        if sequence_id not in self.ids:
            return False
        self.ids.remove(sequence_id)
        for submission in self._submitted:
            submission.turns = [
                turn for turn in submission.turns if turn.sequence.id != sequence_id
            ]
        return True
