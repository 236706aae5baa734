"""A stub's connection to the engine process, made again whenever it is lost."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from backend.ipc.messages import (
    MAX_FRAME_BYTES,
    ErrorReply,
    FrameError,
    Frames,
    FromEngine,
    Hello,
    IpcMessage,
    ProtocolVersionError,
    check_hello,
    frame,
)
from backend.request import ErrorCode, RequestError

logger = logging.getLogger(__name__)

RETRY_S = 0.1
GRACE_S = 3.0
"""How long messages are kept for an engine that has just gone before they are refused."""
DOWN = "the engine is starting or restarting: try again later"
SEND_LIMIT_S = 5
"""How long the engine process may leave its socket unread before the connection counts as lost."""


class EngineLink:
    """Sends messages from any thread, and never waits for an engine that is down.

    Messages are then kept for the grace period, after which each is answered by ``ErrorReply``.
    ``on_message`` and ``on_lost`` are called on the link's own thread; ``on_lost`` has returned
    before another connection is made. ``greeting`` messages follow the hello on every connection.
    ``info`` is the engine's hello.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        greeting: tuple[IpcMessage, ...] = (),
        *,
        grace_s: float = GRACE_S,
        send_limit_s: int = SEND_LIMIT_S,
    ) -> None:
        self._grace_s, self._send_limit_s = grace_s, send_limit_s
        self._path = path
        self._on_message = on_message
        self._on_lost = on_lost
        self._greeting = greeting
        self.info: dict[str, Any] = {}
        self._sock: socket.socket | None = None
        self._waiting: list[IpcMessage] = []
        self._send_lock = threading.Lock()
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._down_since_s = monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the link is up, waiting for it at most ``timeout_s``."""
        return self._connected.is_set() or self._connected.wait(timeout_s)

    def send(self, message: IpcMessage) -> None:
        """Send a message, or hold it. Raises RequestError: UNAVAILABLE when the engine is down for
        too long, INVALID_ARGUMENT for text that cannot be encoded or is too long.
        """
        try:
            data = frame(message)
        except UnicodeEncodeError as error:
            reason = f"text has a lone surrogate at character {error.start}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, reason) from error
        if len(data) > MAX_FRAME_BYTES:  # the engine would close the connection of all requests
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"the request of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES} bytes",
            )
        with self._send_lock:
            if self._sock is None:
                if self._is_over():
                    raise RequestError(ErrorCode.UNAVAILABLE, DOWN)
                self._waiting.append(message)
                return
            try:
                self._sock.sendall(data)
            except OSError as error:
                self._shut(self._sock)  # half a frame may be out: it is of no more use
                raise RequestError(
                    ErrorCode.UNAVAILABLE, f"the engine refuses requests: {error}"
                ) from error

    def close(self) -> None:
        """End the connection and the thread."""
        self._closing.set()
        if (sock := self._sock) is not None:
            self._shut(sock)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                sock = self._connect()
            except OSError:
                self._refuse_waiting()
                self._closing.wait(RETRY_S)
                continue
            self._serve(sock)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self._send_limit_s, 0)
            )
            sock.sendall(b"".join(frame(message) for message in (Hello(), *self._greeting)))
        except OSError:
            sock.close()
            raise
        return sock

    def _serve(self, sock: socket.socket) -> None:
        """Read until the peer has gone; the link is up from its hello on."""
        frames: Frames[IpcMessage] = Frames(FromEngine)
        try:
            while data := sock.recv(1 << 18):
                for message in frames.feed(data):
                    if self._sock is None:
                        self.info = check_hello(message).info
                        self._open(sock)
                    else:
                        self._on_message(message)
        except ProtocolVersionError as error:
            logger.error("the engine process cannot be used: %s", error)
        except (OSError, FrameError) as error:
            logger.warning("connection to the engine lost: %s", error)
        except Exception:  # this thread must live on, and no request may wait for one that does not
            logger.exception("connection to the engine failed")
        was_up = self._connected.is_set()
        self._connected.clear()
        with self._send_lock:
            self._sock = None
            sock.close()
        if was_up:
            self._down_since_s = monotonic()
            self._on_lost()
        self._closing.wait(RETRY_S)

    def _open(self, sock: socket.socket) -> None:
        """Let messages go out, those that waited first. Raises OSError; then they wait on."""
        with self._send_lock:
            sock.sendall(b"".join(map(frame, self._waiting)))
            self._sock, self._waiting = sock, []
        self._connected.set()

    def _is_over(self) -> bool:
        return monotonic() >= self._down_since_s + self._grace_s

    def _refuse_waiting(self) -> None:
        """Answer messages that have waited for too long."""
        with self._send_lock:
            expired, self._waiting = (self._waiting, []) if self._is_over() else ([], self._waiting)
        for message in expired:
            self._on_message(ErrorReply(id=message.id, code=ErrorCode.UNAVAILABLE, message=DOWN))

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the engine's socket was closed already")
