"""Reads bodies: small ones in the event loop, large ones in a process of their own.

A body of 4 MiB can take seconds to validate and render (50,000 messages: 2 s). A thread would
share Python's lock with the loop: measured gaps of up to 3 s for the other clients.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from fastapi import Request

from backend import lifeline
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.settings import FrontEnd

logger = logging.getLogger(__name__)

LARGE_BODY_BYTES = 32 * 1024
LONGEST_READ_S = 60.0
"""Time after which a large body is given up, and its process killed."""
_HEADERS = ("content-type", "content-encoding")

T = TypeVar("T")
Read = Callable[[FrontEnd, bytes, Mapping[str, str]], T]


class BodyReader:
    """Runs the functions of ``routes`` on the bodies of requests. Its process starts with the first
    large body, reads one at a time, and starts again after it has died.
    """

    def __init__(self, settings: FrontEnd, large_bytes: int = LARGE_BODY_BYTES) -> None:
        """Read bodies of more than ``large_bytes`` in the process."""
        self.longest_s = LONGEST_READ_S
        self._large_bytes, self._settings = large_bytes, settings
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._child: _Child | None = None

    async def read(self, request: Request, read: Read[T]) -> T:
        """Return what ``read`` makes of a request's body. Raises ApiError."""
        data = await request.body()
        headers = {name: request.headers.get(name, "") for name in _HEADERS}
        if len(data) <= self._large_bytes:
            return read(self._settings, data, headers)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._ask, read, data, headers)

    @property
    def has_process(self) -> bool:
        """Whether the process for large bodies has started."""
        return self._child is not None

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.process.kill()

    def _ask(self, read: Read[T], data: bytes, headers: Mapping[str, str]) -> T:
        child = self._child = self._child or _start(self._settings)
        try:
            child.pipe.send((read, data, headers))
            if not child.pipe.poll(self.longest_s):
                raise TimeoutError(f"no answer within {self.longest_s:g} s")
            result, error = child.pipe.recv()
        except (EOFError, OSError) as failure:
            logger.error("a body of %d bytes could not be read: %r", len(data), failure)
            child.process.kill()
            self._child = None
            raise ApiError(503, "the body could not be read: try again later") from None
        if error is not None:
            raise error
        answer: T = result
        return answer


@dataclass(frozen=True, slots=True)
class _Child:
    """The process and its pipe."""

    process: BaseProcess
    pipe: Connection


def _start(settings: FrontEnd) -> _Child:
    return _Child(*lifeline.spawn(serve, (settings,), "large-bodies"))


def serve(pipe: Connection, settings: FrontEnd) -> None:
    """Read the bodies that come through the pipe (the child's only function)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
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
