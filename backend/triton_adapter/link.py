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

from backend.ipc import wire
from backend.request import ErrorCode, RequestError

logger = logging.getLogger(__name__)

RETRY_S = 0.1
GRACE_S = 3.0
"""How long requests wait for an engine that has just gone before they are refused."""
SEND_LIMIT_S = 5
"""How long the engine process may leave its socket unread before the connection counts as lost."""


class EngineLink:
    """Sends messages from any thread; ``on_message`` and ``on_lost`` are called on the link's own
    thread. ``info`` is the engine's hello.

    ``on_lost`` has returned before another connection is made; ``greeting`` messages follow the
    hello on every connection.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[wire.Message], None],
        on_lost: Callable[[], None],
        greeting: tuple[wire.Message, ...] = (),
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_lost = on_lost
        self._greeting = greeting
        self.info: dict[str, Any] = {}
        self._sock: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._connected = threading.Event()
        self._closed = threading.Event()
        self._down_since_s = monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the link is up, waiting for it at most ``timeout_s`` (by default what is
        left of the grace period).
        """
        if timeout_s is None:
            timeout_s = self._down_since_s + GRACE_S - monotonic()
        return self._connected.is_set() or self._connected.wait(max(0.0, timeout_s))

    def send(self, message: wire.Message) -> None:
        """Send a message. Raises RequestError (UNAVAILABLE) when the engine cannot be reached."""
        frame = wire.encode(message)
        with self._send_lock:
            sock = self._sock
            if sock is None:
                raise RequestError(
                    ErrorCode.UNAVAILABLE, "the engine is starting or restarting: try again later"
                )
            try:
                sock.sendall(frame)
            except OSError as error:
                self._shut(sock)  # half a frame may be out: this connection is of no more use
                raise RequestError(
                    ErrorCode.UNAVAILABLE, f"the engine does not take requests: {error}"
                ) from error

    def close(self) -> None:
        """End the connection and the thread."""
        self._closed.set()
        if (sock := self._sock) is not None:
            self._shut(sock)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                sock = self._connect()
            except (OSError, wire.WireError) as error:
                if isinstance(error, wire.WireError):
                    logger.error("the engine process cannot be used: %s", error)
                self._closed.wait(RETRY_S)
                continue
            self._serve(sock)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0)
            )
            sock.sendall(
                b"".join(wire.encode(message) for message in (wire.hello(), *self._greeting))
            )
        except OSError:
            sock.close()
            raise
        return sock

    def _serve(self, sock: socket.socket) -> None:
        """Read until the peer has gone; the link is up from its hello on."""
        decoder = wire.Decoder()
        try:
            while data := sock.recv(1 << 18):
                for message in decoder.feed(data):
                    if self._sock is None:
                        self.info = wire.check_hello(message)["info"]
                        self._sock = sock
                        self._connected.set()
                    else:
                        self._on_message(message)
        except (OSError, wire.WireError) as error:
            logger.warning("connection to the engine lost: %s", error)
        except Exception:  # this thread must live on, and no request may wait for one that does not
            logger.exception("connection to the engine given up")
        was_up = self._connected.is_set()
        self._connected.clear()
        with self._send_lock:
            self._sock = None
            sock.close()
        if was_up:
            self._down_since_s = monotonic()
            self._on_lost()
        self._closed.wait(RETRY_S)

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the engine's socket was closed already")
