"""What the target has been given and has not yet answered."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from backend.core.isolation import run_again, run_turns
from backend.core.session import Session
from backend.engines.port import Completion, Engine, Turn
from backend.ops.stats import StepStats
from backend.speculation.drafting import Proposals
from backend.speculation.step_log import StepLog
from policy import Plan, View

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Submission:
    """A batch that is drafted for and verified at once, from its plan to what is learnt of it: the
    rows of view and plan are ``sessions``.

    ``turns`` are what the target is given: theirs and the chunks of prompts.
    """

    sessions: list[Session]
    prefill: list[Turn]
    view: View
    plan: Plan
    log: StepLog
    turns: list[Turn] = field(default_factory=list)


class InFlight:
    """Submits to a step engine, which runs only while it is waited for, and takes back.
    ``proposals`` are those of every sequence in flight.
    """

    def __init__(self, target: Engine, stats: StepStats) -> None:
        self.proposals: dict[int, Proposals] = {}
        self._target = target
        self._stats = stats
        self._submitted: deque[Submission] = deque()

    def __len__(self) -> int:
        return len(self._submitted)

    def submit(self, submission: Submission, proposals: dict[int, Proposals]) -> None:
        """Take a submission, which the target begins when it is to be collected."""
        self.proposals.update(proposals)
        for turn in submission.prefill:
            self.proposals[turn.sequence.id] = Proposals()
        self._submitted.append(submission)

    def collect(self) -> tuple[Submission, list[Completion], bool]:
        """Wait for the submission; return it, its completions, and whether the target failed with
        all of them.

        A target that raises fails only the turns that raise again alone.
        """
        submission = self._submitted.popleft()
        try:
            with submission.log.part("verify"):
                return submission, run_turns(self._target, submission.turns), False
        except Exception:
            logger.exception("the target failed; its submission is run again without proposals")
        self._stats.fallback("target_error")
        self.proposals = {turn.sequence.id: Proposals() for turn in submission.turns}
        with submission.log.part("verify"):
            completions = run_again(self._target, submission.turns) if submission.turns else []
        return (
            submission,
            completions,
            bool(completions) and all(completion.error is not None for completion in completions),
        )

    def forget(self, sequence_id: int) -> bool:
        """Take a sequence out; return whether its turn was in flight."""
        if self.proposals.pop(sequence_id, None) is None:
            return False
        for submission in self._submitted:
            submission.turns = [
                turn for turn in submission.turns if turn.sequence.id != sequence_id
            ]
        return True
