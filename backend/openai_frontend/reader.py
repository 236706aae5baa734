"""Reads bodies in processes of their own, so that none holds up the event loop.

A body of 4 MiB can take seconds to validate and render (50,000 messages: 2 s), and a small one as
long as its chat template likes. A thread would share Python's lock with the loop: measured gaps of
up to 3 s for the other clients.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Semaphore
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from backend import lifeline
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.front_end import FrontEnd

logger = logging.getLogger(__name__)

PROCESSES = 3
LARGE_BODY_BYTES = 32 * 1024
"""Bodies over this size take all processes but one at most: small ones never wait for them."""
LONGEST_READ_S = 5.0
"""Time after which a body is given up, and its process killed."""
LONGEST_START_S = 60.0
"""Time for a process to start on a busy machine."""
READ_BYTES_PER_S = 256 * 1024
"""More time for a body by its size: a second for each of these."""
MOST_WAITING = 1024
"""Bodies that are read or wait for that."""
MOST_WAITING_BYTES = 256 * 1024 * 1024
"""Their bytes."""
MOST_MEMORY_BYTES = 2 * 1024 * 1024 * 1024
"""Memory of a process: a template may make a text of any length."""
_HEADERS = ("content-type", "content-encoding")

T = TypeVar("T")
Read = Callable[[FrontEnd, bytes, Mapping[str, str]], T]


class BodyReader:
    """Runs the functions of ``routes`` on the bodies of requests.

    A process reads one body at a time. One more than are busy waits for the next, up to the limit:
    no body waits for the start of one.
    """

    def __init__(self, settings: FrontEnd) -> None:
        self.longest_s = LONGEST_READ_S
        self.most_waiting = MOST_WAITING
        self._settings = settings
        self._places = Semaphore(PROCESSES)  # of processes that read
        self._idle: deque[_Child] = deque()
        self._small = ThreadPoolExecutor(PROCESSES, "bodies")
        self._large = ThreadPoolExecutor(PROCESSES - 1, "large-bodies")
        self._waiting = self._waiting_bytes = 0
        self._running: set[_Child] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start a process in the background."""
        with suppress(RuntimeError):  # it is being closed
            self._small.submit(self._start_spare)

    async def read(self, request: Request, read: Read[T]) -> T:
        """Return what ``read`` makes of a request's body. Raises ApiError."""
        try:
            data = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        size = len(data)
        if self._waiting >= self.most_waiting or self._waiting_bytes + size > MOST_WAITING_BYTES:
            raise ApiError(503, f"{self._waiting} bodies are waiting to be parsed: try again later")
        headers = {name: request.headers.get(name, "") for name in _HEADERS}
        threads = self._small if size <= LARGE_BODY_BYTES else self._large
        self._waiting += 1
        self._waiting_bytes += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, self._ask, read, data, headers)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    @property
    def pids(self) -> set[int | None]:
        """The processes that run."""
        return {child.process.pid for child in tuple(self._running)}

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
        for child in tuple(self._running):
            child.process.kill()

    def _start_spare(self) -> None:
        with self._places:
            if len(self._running) < PROCESSES:
                self._idle.append(self._start_child())

    def _take(self) -> _Child:
        try:
            child = self._idle.pop()
        except IndexError:
            child = self._start_child()
        if not self._idle and len(self._running) < PROCESSES:
            self.start()
        return child

    def _start_child(self) -> _Child:
        child = _Child(*lifeline.spawn(serve, (self._settings,), "bodies"))
        self._running.add(child)
        if self._is_closed:
            child.process.kill()
        return child

    def _ask(self, read: Read[T], data: bytes, headers: Mapping[str, str]) -> T:
        limit_s = self.longest_s + len(data) / READ_BYTES_PER_S
        with self._places:
            child = None
            try:
                child = self._take()
                if not child.has_started:
                    child.receive(LONGEST_START_S)
                    child.has_started = True
                child.pipe.send((read, data, headers))
                result, error = child.receive(limit_s)
            except (EOFError, OSError) as failure:
                logger.error("a body of %d bytes could not be read: %r", len(data), failure)
                if child is not None:
                    child.process.kill()
                    self._running.discard(child)
                raise ApiError(503, "the body could not be parsed: try again later") from None
            self._idle.append(child)
        if error is not None:
            raise error
        answer: T = result
        return answer


@dataclass(slots=True, eq=False)
class _Child:
    """A process and its pipe."""

    process: BaseProcess
    pipe: Connection
    has_started: bool = False

    def receive(self, limit_s: float) -> Any:
        """Return what it sends next. Raises EOFError or OSError."""
        if not self.pipe.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:.3g} s")
        return self.pipe.recv()


def serve(pipe: Connection, settings: FrontEnd) -> None:
    """Read the bodies that come through the pipe (the child's only function)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > MOST_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, most))
    pipe.send(None)  # it has started, which takes nothing of a body's time
    while True:
        read, data, headers = pipe.recv()
        pipe.send(_outcome(read, settings, data, headers))


def _outcome(
    read: Read[Any], settings: FrontEnd, data: bytes, headers: Mapping[str, str]
) -> tuple[Any, ApiError | None]:
    try:
        return read(settings, data, headers), None
    except ApiError as error:
        return None, error
    except Exception:
        logger.exception("a body of %d bytes could not be read", len(data))
        return None, ApiError(500, "internal error")
