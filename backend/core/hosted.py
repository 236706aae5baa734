"""The loop over a hosted engine: a task for each session takes its parts, one queue in front."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from backend.core.loop import SHUTTING_DOWN, Loop
from backend.core.session import Session
from backend.engines.hosted import HostedEngine, HostedRequest, NewTokens
from backend.engines.port import EngineLostError, Extras
from backend.ops.stats import StepStats
from backend.request import ErrorCode, RequestError
from backend.sequence import BLOCK_TOKENS

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""The most seconds between two looks; one is due when a request is late."""
ABORT_S = 5.0
"""The most seconds that generations take to be aborted at the end."""


class HostedLoop(Loop):
    """The loop over a hosted engine, which batches, schedules and samples by itself."""

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, HostedEngine]],
        stats: StepStats,
        clock: Callable[[], float],
        *,
        max_active: int,
        max_queued: int,
        max_request_s: float = math.inf,
    ) -> None:
        """Start the engine in an event loop of its own."""
        super().__init__(stats, clock, max_request_s)
        self._max_active, self._max_queued = max_active, max_queued
        self._waiting: deque[Session] = deque()
        self._active: dict[int, tuple[Session, asyncio.Task[None]]] = {}
        self._is_lost = False
        self._events = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._looked_s = self._began_s = clock()
        self.engine = self._events.run_until_complete(start())
        self._k_max = self.engine.limits.k_max

    @property
    def alive_s(self) -> float:
        """The time when the engine last ended a step, or was last given something to do."""
        if not self._active:
            return self._looked_s
        return min(self._looked_s, max(self.engine.stepped_s(), self._began_s))

    def wake(self) -> None:
        """Make the loop look again."""
        with suppress(RuntimeError):  # it is closed
            self._events.call_soon_threadsafe(self._woken.set)

    def counts(self) -> tuple[int, int]:
        """Return (active, waiting) requests."""
        waiting = len(self._waiting) + len(self._inbox) + self.preparing()
        return len(self._active), waiting

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set or the engine is lost; then end what is left."""
        self._events.run_until_complete(self._run(stop))

    def step(self) -> bool:
        """Serve until something has happened; False when there was nothing to do."""
        had_work = bool(self._inbox or self._waiting or self._active) and not self._is_lost
        if had_work or self._changes:
            self._events.run_until_complete(self._look())
        return had_work

    def abort(self, code: ErrorCode, message: str) -> None:
        """End every request that is queued or active with an error."""
        sessions = [*self._inbox, *self._sessions]
        self._inbox.clear()
        for session in sessions:
            self._fail(session, code, message)

    def close(self) -> None:
        """End the engine."""
        self._events.run_until_complete(self._end_tasks())
        self._events.run_until_complete(self.engine.close())
        self._events.close()

    # -- admission

    async def _run(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self._is_lost:
            await self._look()
        restarting = "the engine was lost: it is being restarted"
        self.abort(ErrorCode.UNAVAILABLE, SHUTTING_DOWN if stop.is_set() else restarting)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        """Wait until the engine has aborted what is not over."""
        tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith(_TASK)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_S)

    @property
    def _sessions(self) -> list[Session]:
        """Those that wait for a place or have one."""
        return [*self._waiting, *(session for session, _ in self._active.values())]

    async def _look(self) -> None:
        """End what is over and take what has come in, then sleep until there is more."""
        self._looked_s = self._clock()
        self._woken.clear()
        self._run_changes()
        for session in self._sessions:
            if self._is_over(session):
                self._end(session)
        self._admit()
        while self._inbox:
            self._take(self._inbox.popleft())
            self._admit()  # one by one: none is refused for a full queue while places are free
        self._stats.state(*self.counts(), self.engine.usage(), {})
        late_s = min((session.deadline_s for session in self._sessions), default=math.inf)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, max(0.0, late_s - self._clock()))):
                await self._woken.wait()

    def _take(self, session: Session) -> None:
        """Queue a session, or refuse it."""
        kv_tokens, prompt = self.engine.limits.kv_tokens, session.sequence.prompt_tokens
        if session.sink.cancelled:
            self._end(session)
        elif kv_tokens and prompt + session.request.max_tokens > kv_tokens:
            message = (
                f"max_tokens {session.request.max_tokens} and a prompt of {prompt} tokens need "
                f"more KV cache than this server has"
            )
            self._refuse(session, RequestError(ErrorCode.INVALID_ARGUMENT, message))
        elif len(self._waiting) >= self._max_queued:
            message = f"Exceeds maximum queue size {self._max_queued}"
            self._refuse(session, RequestError(ErrorCode.UNAVAILABLE, message))
        else:
            self._waiting.append(session)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_active and not self._is_lost:
            session = self._waiting.popleft()
            session.admitted_s = now_s = self._clock()
            if not self._active:
                self._began_s = now_s
            if session.trace is not None:
                session.trace.enter("prefill")
            task = self._events.create_task(self._serve(session), name=f"{_TASK}{session.id}")
            self._active[session.id] = session, task

    # -- one request

    async def _serve(self, session: Session) -> None:
        """Generate until the session has ended; what goes wrong with it ends no other."""
        with self._ending_alone(session):
            try:
                async with aclosing(self.engine.generate(_ask(session))) as parts:
                    async for part in parts:
                        self._commit(session, part)
                        if session.finish_reason is not None:
                            return
            except EngineLostError as error:
                logger.exception("the engine is lost; the engine process must restart")
                self._is_lost = True
                self._fail(session, ErrorCode.INTERNAL, f"the engine was lost: {error}")
                return
            raise RuntimeError(f"the engine ended the text after {session.output_tokens} tokens")

    def _commit(self, session: Session, part: NewTokens) -> None:
        """Take what is new, and reply."""
        if part.cached_tokens:
            session.sequence.reused_blocks = part.cached_tokens // BLOCK_TOKENS
        if part.verified_steps:
            session.verified_steps = part.verified_steps
            proposed, accepted = map(sum, zip(*part.verified_steps, strict=True))
            session.drafts[self.engine.limits.draft] = proposed, accepted
        if session.commit(part.tokens, part.log_probs, Extras(top=part.top)):
            if session.trace is not None and session.first_commit_s is None:
                session.trace.enter("decode")
            blocks = -(-len(session.sequence.tokens) // BLOCK_TOKENS)
            session.sequence.new_blocks = blocks - session.sequence.reused_blocks
            self._emit(session)

    def _release(self, session: Session) -> None:
        """Free a session's place, and abort what the engine still runs of it."""
        if session in self._waiting:
            self._waiting.remove(session)
        _, task = self._active.pop(session.id, (session, None))
        if task is None:
            return
        if asyncio.current_task(self._events) is not task:
            task.cancel()
        self._woken.set()


_TASK = "request-"


def _ask(session: Session) -> HostedRequest:
    request, sequence = session.request, session.sequence
    return HostedRequest(
        session.id,
        tuple(sequence.tokens),
        sequence.prompt_tokens,
        session.remaining,
        sequence.sampling,
        salt=sequence.salt,
        guide=None if request.guide_type is None else (request.guide_type, request.guide or ""),
        most_drafted=request.num_draft_tokens,
        control=session.control,
        trace=None if session.trace is None else session.trace.context,
    )
