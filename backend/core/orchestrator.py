"""The loop: before every step of the in-flight batch, plan; then draft, verify, commit and emit."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from backend.core.admission import Admission
from backend.core.batch import Batch
from backend.core.in_flight import InFlightQueue
from backend.core.kv_ledger import KVLedger
from backend.core.loop import SHUTTING_DOWN, Loop
from backend.core.session import Session
from backend.engines.port import AFTER, Completion, Engine, EngineLostError
from backend.log_format import fields
from backend.ops.stats import StepStats
from backend.request import ErrorCode, RequestError
from backend.speculation.cycle import Cycle, DecodeStep
from backend.speculation.drafting import Drafting
from backend.speculation.step_log import StepLog
from policy import AnyPolicy

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failures in a row (a step that raises, or a submission in which nothing succeeds) after which the
loop ends, to be started again.
"""


class Orchestrator(Loop):
    """The loop over step engines: it owns the in-flight batch."""

    def __init__(
        self,
        target: Engine,
        drafting: Drafting,
        policy: AnyPolicy,
        ledger: KVLedger,
        admission: Admission,
        stats: StepStats,
        clock: Callable[[], float],
        *,
        k_max: int,
        prefill_chunk_tokens: int,
        max_request_s: float = math.inf,
        seed: int = 0,
    ) -> None:
        super().__init__(stats, clock, max_request_s)
        self._target = target
        self.cycle = Cycle(drafting, policy, stats, clock, seed)
        self._ledger = ledger
        self._admission = admission
        self._k_max = min(k_max, target.limits.max_draft_tokens)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._work = threading.Event()
        self._active: dict[int, Session] = {}
        self._in_flight = InFlightQueue(target, stats, self.cycle.void)
        self._failures = 0
        self._alive_s = clock()

    @property
    def alive_s(self) -> float:
        """The time of the clock when ``run`` last began a step or looked for work."""
        return self._alive_s

    def draft_with(self, drafts: Seq[Engine], policy: AnyPolicy, policy_state: Any) -> None:
        """Draft and plan with these from now on, between two steps. Raises ValueError, nothing
        changed, where one has too few KV blocks.
        """
        pools = {engine.name: engine.limits.kv_blocks for engine in (self._target, *drafts)}
        self._ledger.change_engines(pools, [session.sequence for session in self._active.values()])
        self.cycle.change(drafts, policy, policy_state)

    def wake(self) -> None:
        """Make an idle loop look again (after a cancellation)."""
        self._work.set()

    def counts(self) -> tuple[int, int]:
        """Return (active, waiting) requests."""
        waiting = len(self._admission) + len(self._inbox) + self.preparing()
        return len(self._active), waiting

    @property
    def in_flight(self) -> int:
        """Submissions that have not been collected."""
        return len(self._in_flight)

    def check(self) -> None:
        """Raise RuntimeError where batch, queue and KV blocks contradict each other. Between two
        steps.
        """
        active = list(self._active.values())
        self._ledger.check(session.sequence for session in active)
        self._admission.check(active)

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set, asleep while there is nothing to do; then end what is left. A
        bug in a step ends its requests only.

        Returns by itself after ``MAX_FAILURES`` failures in a row, and when the target is lost:
        only a new process can mend what is broken then.
        """
        while not stop.is_set() and self._failures < MAX_FAILURES:
            self._work.clear()
            self._alive_s = self._clock()
            try:
                worked = self.step()
            except EngineLostError:
                logger.exception("the target engine is lost; the engine process must restart")
                break
            except Exception as error:
                logger.exception("a step failed; every request ends with an error")
                self._failures += 1
                self.abort(ErrorCode.INTERNAL, f"the serving loop failed ({type(error).__name__})")
                continue
            if not worked:
                self._work.wait(timeout=1.0)
        reason = (
            SHUTTING_DOWN if stop.is_set() else "the engine keeps failing: it is being restarted"
        )
        self.abort(ErrorCode.UNAVAILABLE, reason)
        self.hold_replies(False)

    def step(self) -> bool:
        """Take one step of what is ready; False when there was nothing to do. The numbers are those
        of a request's eight steps in ``docs/explanation/how-it-works.md``.
        """
        self._change()
        log = self.cycle.begin()
        self._update_batch()  # 3: admit
        batch = self._ready()
        if not self._active and not self._in_flight:
            self._learn()
            self.hold_replies(False)
            return False
        has_submitted = bool(batch) and self._submit(batch, log)  # 4 to 6: plan, draft, verify
        if self._in_flight.is_full or not has_submitted:
            self._collect()  # 7 and 8: commit, emit, learn
        if not self._active:
            self.cycle.pause()
        return True

    def _ready(self) -> Batch:
        """Return what can be submitted; nothing while the loop is to change between two steps."""
        sessions = () if self._changes else self._active.values()
        return Batch.of(sessions, self._in_flight, self._target, self._prefill_chunk_tokens)

    def _submit(self, batch: Batch, log: StepLog) -> bool:
        """Plan for a batch, draft and submit it; return whether anything of it does not wait."""
        cycle = self.cycle
        view = batch.view(cycle.drafting, self._k_max, cycle.runner.needs_ceilings)
        sequences = [session.sequence for session in batch.decoding]
        plan = cycle.runner.plan(view, log)
        self.hold_replies(False)  # not after the drafts' passes
        step = cycle.propose(sequences, view, plan, log, following=batch.following)
        submission = batch.submission(step)
        if not submission.turns:
            return False
        self._in_flight.submit(submission)
        return True

    def _change(self) -> None:
        if self._changes and not self._in_flight:
            self.cycle.pause()
            self._run_changes()

    def abort(self, code: ErrorCode, message: str) -> None:
        """End every request that is queued or active with an error."""
        while self._inbox:
            self._reply_error(self._inbox.popleft(), code, message)
        for session in [*self._admission.clear(), *self._active.values()]:
            self._fail(session, code, message)
        self._in_flight.drop()
        self.cycle.pause()
        self._learn()

    # -- admit: requests in, cancelled ones out

    def _update_batch(self) -> None:
        """End what is cancelled or late, give places back where KV runs out, and admit."""
        for session in [
            *self._admission.remove(self._is_over),
            *filter(self._is_over, self._active.values()),
        ]:
            self._end(session)
        for session in self._admission.make_room(self._active.values()):
            self._forget(session)
            self._stats.preemption()
            logger.info(
                "request pre-empted",
                extra=fields(request=session.id, output_tokens=session.output_tokens),
            )
            if session.trace is not None:
                session.trace.enter("queue")
        self._admit()
        while self._inbox:
            session = self._inbox.popleft()
            if session.sink.cancelled:
                self._end(session)
                continue
            try:
                self._admission.offer(session)
            except RequestError as error:
                self._refuse(session, error)
            self._admit()  # one by one: none is refused for a full queue while places are free

    def _admit(self) -> None:
        for session in self._admission.admit(len(self._active)):
            self._active[session.id] = session
            if session.admitted_s is None:
                session.admitted_s = self._clock()
            if session.trace is not None:
                session.trace.enter("prefill")

    def _collect(self) -> None:
        """Wait for the oldest submission, take its tokens and learn from it."""
        if not self._in_flight:
            return  # a change between two steps was asked for meanwhile
        self.hold_replies(False)
        submission, completions, failed = self._in_flight.collect()
        self.hold_replies(True)
        if failed:
            self._failures += 1
        elif completions:
            self._failures = 0
        step, turns = submission.step, submission.turns.values()
        self.cycle.catch_up(step, [turn.sequence for turn in turns if turn.end == AFTER])
        emitting = [session for c in completions if (session := self._commit(c, step)) is not None]
        self._absorb(completions, step)
        for session in emitting:
            with self._ending_alone(session):
                self._emit(session)
        self._learn(step if turns else None)

    # -- commit and emit

    def _commit(self, completion: Completion, step: DecodeStep) -> Session | None:
        """Take a completion's tokens; return its session where it got any."""
        session = self._active.get(completion.sequence_id)
        if session is None:
            return None
        if completion.error is not None:
            self._fail(session, ErrorCode.INTERNAL, completion.error)
            return None
        with self._ending_alone(session):
            if self._commit_tokens(session, completion, step):
                return session
        return None

    def _commit_tokens(self, session: Session, completion: Completion, step: DecodeStep) -> int:
        """Take a completion's tokens; return how many were taken."""
        if completion.drafted is not None:
            step.take(session.id, completion.drafted, completion.verified)
        count = session.commit(completion.tokens, completion.log_probs, completion.extras)
        proposal = step.proposal_of(session.id)
        if session.trace is not None:
            session.trace.step(step.log, proposal, min(completion.accepted, count), count)
        if not count:
            return 0  # a prefill chunk, which draws nothing
        if proposal:
            session.count_speculated(proposal, min(completion.accepted, count))
        emitted, nodes = completion.tokens[:count], len(proposal) if proposal else 0
        self.cycle.note_verified(step, session.sequence, nodes, emitted, control=session.control)
        return count

    def _absorb(self, completions: Seq[Completion], step: DecodeStep) -> None:
        """Give drafts the target's states of the texts, before any that has ended is released."""
        states = [
            (session.sequence, completion.hidden_states)
            for completion in completions
            if completion.hidden_states is not None
            and (session := self._active.get(completion.sequence_id)) is not None
        ]
        self.cycle.drafting.absorb(states, step.log)

    def _release(self, session: Session) -> None:
        """Forget a request in batch, engines, ledger, and (at the end of the step) policy."""
        self.cycle.drafting.end(session.sequence)
        self._ledger.release(session.sequence)
        self._admission.release(session)
        self._forget(session)
        self.cycle.forget(session.id)

    def _forget(self, session: Session) -> None:
        """Take a request out of the batch and the engines; what its turns in flight draw is never
        used.
        """
        self._active.pop(session.id, None)
        self._in_flight.forget(session.id)
        self._target.cancel([session.id])
        self.cycle.drafting.cancel([session.id])

    def _learn(self, step: DecodeStep | None = None) -> None:
        """Let the policy learn from a step (None: nothing was verified), and show the loop's
        state.
        """
        self.cycle.learn(step)
        self._stats.reuse(self._ledger.take_reuse())
        rows = (0, 0, 0)
        if step is not None:
            log = step.log
            rows = log.decoding, log.batch_size - log.decoding, log.prefill_tokens
        drift = self.cycle.runner.drift()
        self._stats.state(*self.counts(), self._ledger.usage(), drift, rows)
