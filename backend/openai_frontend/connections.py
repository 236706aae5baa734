"""Connections of the front end: a request has a time to come in, and those that wait for one give
way to others. At its end the server answers until the requests in flight have ended.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from http import HTTPStatus
from time import monotonic
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from backend.openai_frontend.errors import ApiError

HEAD_S = 30.0
"""Time for the head of a request, from its first byte, or from the start of a connection."""
BODY_S = 30.0
"""Time for its body, besides that by its size."""
BODY_BYTES_PER_S = 16 * 1024
"""More time for a body: a second for each of these that have come."""
MOST_CONNECTIONS = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Connections at once: at most half of the files that the process may open."""


class Connection(H11Protocol):
    """A connection on which requests come in time.

    If there are too many, the one that has waited longest for a request ends for a new one.
    """

    head_s: ClassVar[float] = HEAD_S
    body_s: ClassVar[float] = BODY_S
    most: ClassVar[int] = MOST_CONNECTIONS
    _silent: ClassVar[dict[Connection, None]] = {}  # without a request, in order of waiting

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._awaits: object = None  # the state of h11 that the timer is for
        self._since_s = 0.0
        self._bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._make_room()
        self._await(h11.IDLE, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._await(None, 0)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._await(self.conn.their_state, len(data))

    def on_response_complete(self) -> None:
        """Be free for the next request, for as long as an idle connection stays."""
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:
            self._await(self.conn.their_state, 0)
        elif not self.transport.is_closing():
            self._silent[self] = None

    def _await(self, state: object, size: int) -> None:
        """Give the head or the body of a request its time, from now on if it is another state;
        ``size`` more bytes have come.
        """
        if state is h11.IDLE:
            self._silent.setdefault(self, None)
        else:
            self._silent.pop(self, None)
        if state is self._awaits:
            self._bytes += size
            return
        self._awaits, self._bytes = state, size
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if state in (h11.IDLE, h11.SEND_BODY):
            self._since_s = self.loop.time()
            self._timer = self.loop.call_later(self._limit_s, self._check)

    @property
    def _limit_s(self) -> float:
        if self._awaits is h11.IDLE:
            return self.head_s
        return self.body_s + self._bytes / BODY_BYTES_PER_S

    def _check(self) -> None:
        """Close the connection if its time is over."""
        left_s = self._since_s + self._limit_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check)
            return
        if not self._bytes:  # browsers connect beforehand: an answer would be one to no request
            self.transport.close()
            return
        part = "head" if self._awaits is h11.IDLE else "body"
        self._refuse(ApiError(408, f"the {part} of the request did not arrive in time"))

    def _make_room(self) -> None:
        """Close the connection that has waited longest, or if none waits, this one."""
        if (longest := next(iter(self._silent), None)) is not None:
            self._silent.pop(longest)
            longest.transport.close()
        else:
            self._refuse(ApiError(503, f"all {self.most} connections are in use"))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer unless one has begun."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """Goes on answering after a signal, ``/health`` by 503, until the requests in flight have
    ended. uvicorn's own would refuse connections at once.
    """

    def __init__(self, config: uvicorn.Config, draining: threading.Event, drain_s: float) -> None:
        """Give requests in flight ``drain_s`` to end. Once ``draining`` is set a signal ends it at
        once.
        """
        super().__init__(config)
        self._draining = draining
        self._drain_s = drain_s
        self._is_ending = False
        self._deadline_s = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; end at once at the second signal."""
        if self._draining.is_set():
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._is_ending = True
        self._deadline_s = monotonic() + self._drain_s
        self._draining.set()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, ten times a second."""
        if self._is_ending:
            is_over = monotonic() >= self._deadline_s or not self.server_state.tasks
            self.should_exit = self.should_exit or is_over
        return await super().on_tick(counter)
