"""Turns that the target has been given and has not yet answered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace

from backend.engines.port import (
    AFTER,
    Completion,
    Engine,
    EngineLostError,
    KeepsWidth,
    LooksAhead,
    Turn,
)
from backend.ops.stats import StepStats
from backend.speculation.cycle import DecodeStep

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Submission:
    """A batch that the target verifies at once: the rows of a step, and chunks of prompts."""

    step: DecodeStep
    turns: dict[int, Turn]  # by sequence id


class InFlightQueue:
    """The queue of at most ``1 + lookahead`` submissions that the target works on, which are
    collected in their order.
    """

    def __init__(
        self, target: Engine, stats: StepStats, void: Callable[[DecodeStep], None]
    ) -> None:
        """``void`` is called for a step that the target could not run, before it runs again without
        proposals.
        """
        self._target = target
        self._void = void
        self._stats = stats
        self._submitted: deque[Submission] = deque()
        self._error: Exception | None = None  # from ``Engine.submit``

    def __len__(self) -> int:
        return len(self._submitted)

    @property
    def is_full(self) -> bool:
        """Whether one must be collected before another is submitted."""
        return len(self._submitted) > self._target.limits.lookahead

    def turn(self, sequence_id: int) -> Turn | None:
        """Return the last turn of a sequence in flight."""
        for submission in reversed(self._submitted):
            if (turn := submission.turns.get(sequence_id)) is not None:
                return turn
        return None

    def submit(self, submission: Submission) -> None:
        """Give a submission to the target; an error of that counts when it is collected."""
        self._submitted.append(submission)
        try:
            with submission.step.log.part("verify"):
                self._target.submit([*submission.turns.values()])
        except Exception as error:
            self._error = error

    def collect(self) -> tuple[Submission, list[Completion], bool]:
        """Wait for the oldest submission; return it, its completions, and whether the target failed
        with all of them.

        A target that raises fails only the turns that raise again alone. Later submissions are
        void: their rows are planned for again. Raises EngineLostError.
        """
        submission = self._submitted.popleft()
        log, error = submission.step.log, self._error
        try:
            if error is not None:
                raise error
            with log.part("verify"):
                completions = self._target.poll(timeout_s=1.0)
            if self._target.limits.lookahead and isinstance(self._target, LooksAhead):
                log.parts_s.update(self._target.parts_s())
            if isinstance(self._target, KeepsWidth):
                log.pass_tokens, _ = self._target.width()
            return submission, completions, False
        except EngineLostError:
            raise
        except Exception:
            logger.exception("the target failed; retrying without proposals")
        self._stats.fallback("target_error")
        self._error = None
        self._submitted.clear()
        self._void(submission.step)
        turns = [_from_here(turn) for turn in submission.turns.values()]
        with log.part("verify"):
            completions = run_again(self._target, turns) if turns else []
        has_failed = all(completion.error is not None for completion in completions)
        return submission, completions, bool(completions) and has_failed

    def forget(self, sequence_id: int) -> None:
        """Take a sequence out of all submissions."""
        for submission in self._submitted:
            submission.turns.pop(sequence_id, None)

    def drop(self) -> None:
        """Wait until nothing is in flight, and use nothing of it."""
        while self._submitted:
            with suppress(EngineLostError):
                self.collect()


def _from_here(turn: Turn) -> Turn:
    """Return a turn without the one that it followed, which has been committed."""
    return replace(turn, end=len(turn.sequence.tokens)) if turn.end == AFTER else turn


def run_turns(target: Engine, turns: Seq[Turn]) -> list[Completion]:
    """Submit turns and return what is complete."""
    target.submit(turns)
    return target.poll(timeout_s=1.0)


def run_again(target: Engine, turns: Seq[Turn]) -> list[Completion]:
    """Run the turns of a submission that raised again, without their proposals; where that raises
    too, in halves.

    A turn that raises alone completes with its error. One culprit among n turns costs about 2
    log2(n) passes. Lossless: an exception voids a submission (see ``backend.engines.port``), and
    what the discarded pass drew was never used.
    """
    plain = [replace(turn, proposal=None, device_proposal=None) for turn in turns]
    try:
        return run_turns(target, plain)
    except EngineLostError:
        raise
    except Exception as error:
        if len(plain) == 1:
            logger.exception("the target failed on sequence %d alone", plain[0].sequence.id)
            return [
                Completion(
                    plain[0].sequence.id, [], error=f"the engine failed ({type(error).__name__})"
                )
            ]
    half = len(plain) // 2
    return run_again(target, plain[:half]) + run_again(target, plain[half:])
