"""What an asynchronous target has been given: one in-flight batch, out of which turns come back one
by one while others go in.

Every step plans for what is back; what is in flight shares every iteration with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from backend.core.in_flight import InFlight, Submission
from backend.core.isolation import run_again
from backend.engines.port import Completion, Engine, Turn
from backend.ops.stats import StepStats
from backend.speculation.drafting import Proposals
from backend.speculation.step_log import StepLog
from policy import Plan, Ran, View

logger = logging.getLogger(__name__)


class TurnInFlight(NamedTuple):
    """A turn in flight: when it was handed over, whether nothing else was in flight then, and its
    tokens in its first iteration.
    """

    turn: Turn
    since_s: float
    alone: bool
    tokens: int
    prompt: bool


class AsynchronousInFlight(InFlight):
    """``InFlight`` over a target that completes turns in any order. A submission is what is handed
    over in a step, and is collected with whatever is back by then; ``rows`` stay in flight.
    """

    def __init__(self, target: Engine, stats: StepStats) -> None:
        super().__init__(target, stats)
        self._turns: dict[int, TurnInFlight] = {}
        self._rows: tuple[View, Plan] | None = None
        self._boundary_s: float | None = None  # when an iteration has ended, if that was seen

    def __len__(self) -> int:
        return int(bool(self._submitted or self.proposals))

    @property
    def rows(self) -> tuple[View, Plan] | None:
        """The rows in flight as they were when they were handed over, and what was planned for
        them.
        """
        if self._rows is None:
            return None
        view, plan = self._rows
        rows = np.array(
            [row for row, request in enumerate(view.request.tolist()) if request in self.proposals],
            np.int64,
        )
        self._rows = (view.of_rows(rows), plan.of_rows(rows)) if len(rows) else None
        return self._rows

    @property
    def prefilling(self) -> int:
        """How many prompts are in flight."""
        return sum(one.prompt for one in self._turns.values())

    def submit(self, submission: Submission, proposals: dict[int, Proposals]) -> None:
        """Take a submission, which is handed over when it is collected."""
        before, view, plan = self.rows, submission.view, submission.plan
        if before is not None:
            draft, length = (
                np.concatenate([getattr(p, name) for p in (plan, before[1])])
                for name in ("draft", "length")
            )
            view, plan = view.beside(*before), Plan(draft, length)
        self._rows = (view, plan) if len(view) else None
        super().submit(submission, proposals)

    def collect(self, log: StepLog) -> tuple[Submission, list[Completion], bool]:
        """Hand over the step's submission, if there is one, and wait until anything is back; times
        go to its log, ``log`` where there is none.

        A target that raises fails only the turns that raise again alone.
        """
        submission = (
            self._submitted.popleft()
            if self._submitted
            else Submission([], [], NOTHING, Plan(NOTHING.request, NOTHING.request), log)
        )
        try:
            return submission, self._exchange(submission), False
        except Exception:
            logger.exception("the target failed; what was in flight is run again without proposals")
        self._stats.fallback("target_error")
        turns = {
            **{i: one.turn for i, one in self._turns.items()},
            **{turn.sequence.id: turn for turn in submission.turns},
        }
        again = [_from_here(turn) for i, turn in turns.items() if i in self.proposals]
        self.proposals, self._turns, self._boundary_s = (
            {i: Proposals() for i in turns if i in self.proposals},
            {},
            None,
        )
        completions = run_again(self._target, again) if again else []
        return (
            submission,
            completions,
            bool(completions) and all(completion.error is not None for completion in completions),
        )

    def forget(self, sequence_id: int) -> bool:
        """Take a sequence out; return whether its turn was in flight."""
        self._turns.pop(sequence_id, None)
        return super().forget(sequence_id)

    def _exchange(self, submission: Submission) -> list[Completion]:
        started_s = perf_counter()
        if submission.turns:
            self._target.submit(submission.turns)
            alone, prompts = not self._turns, {turn.sequence.id for turn in submission.prefill}
            for turn in submission.turns:
                tokens = 1 + (len(turn.proposal) if turn.proposal else 0)
                self._turns[turn.sequence.id] = TurnInFlight(
                    turn, started_s, alone, tokens, turn.sequence.id in prompts
                )
        completions = self._target.poll(0.0)
        waited = not completions
        if waited:
            completions = self._target.poll(1.0)
        now_s = perf_counter()
        while self._turns and (more := self._target.poll(0.0)):
            completions += more
        self._time(submission, completions, now_s if waited else None)
        submission.log.waited_s = now_s - started_s - submission.log.parts_s.get("verify", 0.0)
        return completions

    def _time(
        self, submission: Submission, completions: Seq[Completion], ended_s: float | None
    ) -> None:
        """Note what was drafted in this step, and how long iterations took of which it is known
        when it began and who was in it.

        Who is back was in it, and who runs on freely; who has been handed over since it began waits
        for the next. With prompts in flight, of which the executor runs parts that it does not tell
        of, and where the answers had been waiting for the loop, it is not known.
        """
        log, rows = submission.log, submission.sessions
        lengths = [len(drafted) if (drafted := self.proposals[s.id].drafted) else 0 for s in rows]
        log.ran = Ran(submission.view.request, submission.plan.draft, np.array(lengths, np.int64))
        over = [completion.sequence_id for completion in completions if not completion.partial]
        back = [self._turns.pop(sequence_id) for sequence_id in over if sequence_id in self._turns]
        boundary_s, self._boundary_s = self._boundary_s, ended_s
        if not back:
            return
        timed = None if self.prefilling else _timed(back, boundary_s, ended_s)
        if timed is None or ended_s is None:
            self._stats.fallback("step_untimed")
            return
        took_s, iterations = timed
        there = back + [
            one
            for one in self._turns.values()
            if one.turn.run > 1 and one.since_s < ended_s - took_s
        ]
        context_tokens = sum(one.turn.end for one in there)
        tokens = sum(one.tokens for one in there)
        log.parts_s["verify"] = took_s
        log.ran = Ran(
            log.ran.request,
            log.ran.draft,
            log.ran.length,
            tokens,
            len(there),
            context_tokens,
            iterations,
        )


def _timed(
    back: Seq[TurnInFlight], boundary_s: float | None, ended_s: float | None
) -> tuple[float, int] | None:
    """Return the seconds of the turns that are back, and how many iterations they were; None where
    that is not known.

    A turn begins at once where nothing else was in flight, else with the iteration behind the next
    boundary. Runs of n tokens are n iterations; runs of different lengths that end together began
    apart.
    """
    if ended_s is None or any(one.prompt for one in back):
        return None
    iterations = {1 if one.turn.proposal else one.turn.run for one in back}
    since = {one.since_s if one.alone else boundary_s for one in back}
    if len(iterations) > 1 or len(since) > 1:
        return None
    (count,), (since_s,) = iterations, since
    if (
        since_s is None
        or any(not one.alone and one.since_s > since_s for one in back)
        or (count > 1 and not back[0].alone)
    ):
        return None
    return ended_s - since_s, count


def _from_here(turn: Turn) -> Turn:
    """Return a turn behind the tokens that have come of it."""
    return replace(turn, end=len(turn.sequence.tokens)) if turn.run else turn


_NONE = np.zeros(0, np.int64)
NOTHING = View(
    (),
    *(_NONE, _NONE, _NONE),
    *(_NONE.reshape(0, 0), _NONE.reshape(0, 0)),
    np.zeros(0, np.bool_),
)
