"""The part of a loop that does not depend on which engine runs: what others ask of it, and how
requests get their replies.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from backend.core.session import Session
from backend.log_format import fields
from backend.ops.stats import StepStats
from backend.request import ErrorCode, GenerationRequest, RequestError

logger = logging.getLogger(__name__)

CANCELLED = "Request cancelled by client"
SHUTTING_DOWN = "the server is shutting down"


class Loop(ABC):
    """Owns the requests in flight. ``submit``, ``wake`` and ``between_steps`` may be called from
    any thread, all else from the loop's thread only.
    """

    def __init__(
        self, stats: StepStats, clock: Callable[[], float], max_request_s: float = math.inf
    ) -> None:
        self._stats, self._clock = stats, clock
        self._max_request_s = max_request_s
        self._k_max = 0
        self._inbox: deque[Session] = deque()
        self._changes: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self.preparing: Callable[[], int] = int
        """Returns how many requests wait elsewhere, for their grammar to be read."""
        self.hold_replies: Callable[[bool], object] = bool
        """Makes the front keep replies (True) or send them (False), which the loop calls before it
        waits for an engine or for work.
        """

    @property
    @abstractmethod
    def alive_s(self) -> float:
        """The time of the clock when the loop last began a step or looked for work, at least once a
        second while idle.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make an idle loop look again (after a cancellation)."""

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Return (active, waiting) requests."""

    @abstractmethod
    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, or until only a new process can mend what is broken; then
        end what is left.
        """

    @abstractmethod
    def step(self) -> bool:
        """Serve until something has happened; False when there was nothing to do."""

    @abstractmethod
    def abort(self, code: ErrorCode, message: str) -> None:
        """End every request that is queued or active with an error."""

    @abstractmethod
    def _release(self, session: Session) -> None:
        """Forget a request everywhere."""

    def submit(self, session: Session, arrived_s: float | None = None) -> None:
        """Hand over a session, which arrived at that time of the clock (None: now); it will get
        exactly one final reply.
        """
        session.arrived_s = self._clock() if arrived_s is None else arrived_s
        session.k_max = self._k_max
        session.deadline_s = session.arrived_s + self.longest_s(session.request)
        self._inbox.append(session)
        self.wake()

    def longest_s(self, request: GenerationRequest) -> float:
        """Return how long a request may live."""
        own_s = request.timeout_s
        return self._max_request_s if own_s is None else min(own_s, self._max_request_s)

    def lateness(self, request: GenerationRequest) -> str:
        """Count a request that has lived too long and return the sentence of its error."""
        own_s = request.timeout_s
        if own_s is not None and own_s < self._max_request_s:
            limit = f"its timeout, {own_s:g} s"
        else:
            self._stats.fallback("deadline")
            limit = f"limits.max_request_s, {self._max_request_s:g} s"
        return f"the request has not ended within {limit}"

    def between_steps(self, change: Callable[[], None]) -> Future[None]:
        """Run ``change`` in the loop's thread once no step is under way (any thread); the future
        ends with it, or with what it raises.
        """
        done: Future[None] = Future()
        self._changes.append((change, done))
        self.wake()
        return done

    def _run_changes(self) -> None:
        while self._changes:
            change, done = self._changes.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                change()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    # -- replies

    def _is_over(self, session: Session) -> bool:
        return session.sink.cancelled or session.deadline_s < self._clock()

    def _end(self, session: Session) -> None:
        """End a request that is cancelled or late."""
        if session.sink.cancelled:
            self._fail(session, ErrorCode.CANCELLED, CANCELLED)
        else:
            self._fail(session, ErrorCode.UNAVAILABLE, self.lateness(session.request))

    def _refuse(self, session: Session, error: RequestError) -> None:
        """End a request that is not queued; log why."""
        words = fields(code=error.code.value, reason=error.message, waiting=self.counts()[1])
        logger.warning("request refused", extra=words)
        self._reply_error(session, error.code, error.message)

    @contextmanager
    def _ending_alone(self, session: Session) -> Iterator[None]:
        """End a request, and no other, by what goes wrong with it."""
        try:
            yield
        except RequestError as error:
            self._fail(session, error.code, error.message)
        except Exception as error:
            logger.exception("request %d failed: its tokens could not be committed", session.id)
            self._fail(
                session,
                ErrorCode.INTERNAL,
                f"the request could not be continued ({type(error).__name__})",
            )

    def _emit(self, session: Session) -> None:
        """Reply with what was committed, and with the end where the request has ended."""
        now = self._clock()
        since_last_s = None if session.last_commit_s is None else now - session.last_commit_s
        self._stats.emission(now - session.arrived_s, since_last_s, session.control)
        session.last_commit_s = now
        if since_last_s is None:
            session.first_commit_s = now
        if session.finish_reason is not None:
            self._release(session)
            self._stats.request("success")
            usage = session.usage()
            self._stats.count_finished(usage)
            session.sink.final(session.pop_delta(), session.finish_reason, usage)
        elif session.request.stream:
            delta = session.pop_delta()
            if delta.text or delta.tokens:
                session.sink.chunk(delta)

    def _fail(self, session: Session, code: ErrorCode, message: str) -> None:
        self._release(session)
        self._reply_error(session, code, message)

    def _reply_error(self, session: Session, code: ErrorCode, message: str) -> None:
        self._stats.request(code.value.lower())
        session.sink.error(code, message)
