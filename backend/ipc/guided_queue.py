"""Requests with a grammar that has not been read lately: one thread reads, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from backend.core.loop import CANCELLED
from backend.request import ErrorCode, GenerationRequest
from backend.sampling.reading import DEEP_STACK_BYTES

if TYPE_CHECKING:
    from backend.app import App


class Waiting(Protocol):
    """A request's ticket; of the errors that it is given the first is sent."""

    cancelled: bool
    arrived_s: float

    def error(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        ...


T = TypeVar("T", bound=Waiting)


class GuidedQueue(Generic[T]):
    """Prepares requests whose grammar must be read; they count as queued until that has ended.

    ``add`` and ``end_over`` are for one thread.
    """

    def __init__(self, app: App, prepare: Callable[[T, GenerationRequest], None]) -> None:
        """``prepare`` reads the grammar of a request, and does what follows."""
        self._app = app
        self._prepare = prepare
        self._waiting: dict[T, GenerationRequest] = {}  # the first may be at work
        self._lock = threading.Lock()
        usual = threading.stack_size(DEEP_STACK_BYTES)
        try:
            self._thread = ThreadPoolExecutor(1, "grammars")
            self._thread.submit(int).result()  # the thread starts now
        finally:
            threading.stack_size(usual)

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, request: GenerationRequest) -> bool:
        """Return whether a request has a grammar that must be read."""
        kind, grammars = request.guide_type, self._app.preparation.grammars
        return kind is not None and not grammars.knows(
            kind, request.guide or "", request.cache_salt or ""
        )

    def add(self, ticket: T, request: GenerationRequest) -> None:
        """Queue a request, or refuse it: those that wait for the loop share the room."""
        limits = self._app.config.limits
        active, waiting = self._app.loop.counts()
        if waiting >= limits.max_queued_requests + max(0, limits.max_active_requests - active):
            message = f"Exceeds maximum queue size {limits.max_queued_requests}"
            self._refuse(ticket, ErrorCode.UNAVAILABLE, message)
            return
        with self._lock:
            self._waiting[ticket] = request
        self._thread.submit(self._prepare_first)

    def end_over(self) -> None:
        """End what is cancelled or late, also while its grammar is being read."""
        loop, now_s = self._app.loop, monotonic()
        with self._lock:
            for ticket, request in list(self._waiting.items()):
                if ticket.cancelled:
                    self._refuse(ticket, ErrorCode.CANCELLED, CANCELLED)
                elif now_s > ticket.arrived_s + loop.longest_s(request):
                    ticket.cancelled = True
                    self._refuse(ticket, ErrorCode.UNAVAILABLE, loop.lateness(request))
                else:
                    continue
                del self._waiting[ticket]

    def close(self) -> None:
        """Begin no other request."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _refuse(self, ticket: T, code: ErrorCode, message: str) -> None:
        """End and count a request that the loop never gets."""
        self._app.step_stats.request(code.value.lower())
        ticket.error(code, message)

    def _prepare_first(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # the one that this call was for is over
            ticket, request = next(iter(self._waiting.items()))
        try:
            self._prepare(ticket, request)
        finally:
            with self._lock:
                self._waiting.pop(ticket, None)
