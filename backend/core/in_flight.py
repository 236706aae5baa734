"""What the target has been given and has not yet answered: one batch, or several in the order in
which they were submitted.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from backend.core.drafting import Proposals
from backend.core.isolation import run_again, run_turns
from backend.core.session import Session
from backend.core.step_log import StepLog
from backend.engines.overlapped import Overlapped
from backend.engines.port import Completion, Engine, Turn
from backend.ops.stats import StepStats
from policy import Plan, View

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Submission:
    """A batch that is drafted for and verified at once, or one of its cohorts, from its plan to
    what is learnt of it: the rows of view and plan are ``sessions``.

    ``turns`` are what the target is given: theirs and the chunks of prompts.
    """

    sessions: list[Session]
    prefill: list[Turn]
    view: View
    plan: Plan
    log: StepLog
    turns: list[Turn] = field(default_factory=list)
    submitted_s: float = 0.0


class InFlight:
    """Submits to the target and takes back. ``proposals`` are those of every sequence in flight.

    Over an engine that is ``Overlapped`` several submissions are in flight, over another one, which
    runs only while it is waited for.
    """

    def __init__(self, target: Engine, stats: StepStats) -> None:
        self.proposals: dict[int, Proposals] = {}
        self._target = target
        self._overlapped = target if isinstance(target, Overlapped) else None
        self._stats = stats
        self._submitted: deque[Submission] = deque()
        self._collected_s = 0.0

    def __len__(self) -> int:
        return len(self._submitted)

    @property
    def decoding(self) -> list[Session]:
        """The sessions in flight that the next view shows beside those that are ready; none where
        the target has them in one batch.
        """
        if self._overlapped is None:
            return []
        return [
            session
            for submission in self._submitted
            for session in submission.sessions
            if session.id in self.proposals
        ]

    def submit(self, submission: Submission, proposals: dict[int, Proposals]) -> None:
        """Give a submission's turns to the target, which begins with them now where it is
        ``Overlapped``, else when the submission is to be collected.
        """
        self.proposals.update(proposals)
        for turn in submission.prefill:
            self.proposals[turn.sequence.id] = Proposals()
        self._submitted.append(submission)
        if self._overlapped is not None:
            self._overlapped.submit(submission.turns)
            submission.submitted_s = perf_counter()

    @property
    def rows(self) -> tuple[View, Plan] | None:
        """The rows in one in-flight batch with those that are ready: a step engine's passes are of
        what is submitted together.
        """
        return None

    @property
    def prefilling(self) -> int:
        """How many prompts stay in flight from one step to the next."""
        return 0

    def collect(self, log: StepLog) -> tuple[Submission, list[Completion], bool]:  # noqa: ARG002 (each has its own)
        """Wait for the oldest submission; return it, its completions, and whether the target failed
        with all of them.

        A target that raises fails only the turns that raise again alone. The submissions behind it
        are void: their sequences are ready again.
        """
        submission = self._submitted.popleft()
        try:
            return submission, self._poll(submission), False
        except Exception:
            logger.exception("the target failed; its submission is run again without proposals")
        self._stats.fallback("target_error")
        self._submitted.clear()
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

    def _poll(self, submission: Submission) -> list[Completion]:
        if self._overlapped is None:
            with submission.log.part("verify"):
                return run_turns(self._target, submission.turns)
        completions = self._overlapped.poll(timeout_s=1.0)
        now_s = perf_counter()
        submission.log.overlapped(
            now_s - submission.submitted_s, self._overlapped.took_s, self._collected_s
        )
        self._collected_s = now_s
        return completions
