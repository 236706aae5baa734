"""The engine process's end of the socket: one IO thread and two tokeniser threads; the loop waits
for none of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from backend.app import App
from backend.checked_settings import ConfigError
from backend.config import load_config
from backend.core.loop import CANCELLED, SHUTTING_DOWN
from backend.core.session import Delta
from backend.ipc.guided_queue import GuidedQueue
from backend.ipc.messages import (
    Admin,
    AdminReply,
    Cancel,
    Decode,
    Encode,
    ErrorReply,
    Final,
    FrameError,
    Frames,
    FromStub,
    Hello,
    IpcMessage,
    ProtocolVersionError,
    StatsUpdate,
    Submit,
    Subscribe,
    check_hello,
    frame,
)
from backend.ipc.replies import Replies, decode_tokens, encode_texts
from backend.ops.request_trace import ErrorEnding, RequestTrace, ServedEnding
from backend.ops.stats import Usage
from backend.reloading import reload_drafts
from backend.request import ErrorCode, FinishReason, GenerationRequest, RequestError

logger = logging.getLogger(__name__)

STATS_PERIOD_S = 0.5
STUCK_LIMIT_S = 120.0
"""Seconds in one step, after which the loop is taken to hang."""
LONG_TEXT_CHARACTERS = 32 * 1024
"""Longer texts are prepared by a thread of their own: short ones do not wait."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Bytes that a connection may owe before it is closed: a stub that stopped reading must not grow
this process.
"""


class StubConnection:
    """One stub's connection: its unanswered requests and its unsent frames (any thread appends,
    only the IO thread takes).
    """

    def __init__(self, sock: socket.socket, most_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self.sock = sock
        self._most_unsent_bytes = most_unsent_bytes
        self.frames_in: Frames[IpcMessage] = Frames(FromStub)
        self.greeted = False
        self.subscribed = False
        self.tickets: dict[int, Ticket] = {}
        self.frames: deque[bytes] = deque()
        self.unsent = bytearray()

    def flush(self) -> None:
        """Send what the socket takes (IO thread). Raises OSError when the peer has gone or no
        longer reads.
        """
        while self.frames:
            self.unsent += self.frames.popleft()
        if self.unsent:
            with contextlib.suppress(BlockingIOError):  # the selector says when there is room again
                del self.unsent[: self.sock.send(self.unsent)]
        if len(self.unsent) > self._most_unsent_bytes:
            raise ConnectionResetError(f"the stub left {len(self.unsent)} bytes unread")


class Ticket:
    """A request's ``ReplySink``: it turns replies into frames and lets exactly one final reply
    through, which also ends its trace.
    """

    def __init__(
        self,
        server: Server,
        connection: StubConnection,
        request_id: int,
        trace: RequestTrace | None,
    ) -> None:
        self.cancelled = False
        self.arrived_s = monotonic()
        self.trace = trace
        self._server = server
        self._connection = connection
        self._id = request_id

    def chunk(self, delta: Delta) -> None:
        """Send what is new."""
        self._server.post(self._connection, self._server.replies.chunk(self._id, delta))

    def final(self, delta: Delta, reason: FinishReason, usage: Usage) -> None:
        """Send the last reply."""
        message = self._server.replies.final(self._id, delta, reason, usage)
        self._close(message, ServedEnding(reason.value, usage))

    def error(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        self._close(ErrorReply(id=self._id, code=code, message=message), ErrorEnding(code.value))

    def _close(self, message: Final | ErrorReply, ending: ServedEnding | ErrorEnding) -> None:
        if self._connection.tickets.pop(self._id, None) is not None:
            self._server.post(self._connection, message)
            if self.trace is not None:
                self.trace.end(ending)
                self._server.finish(self.trace)


class Server:
    """Serves the socket until stopped. ``post`` and ``finish`` may be called from any thread, all
    else runs on the IO thread.
    """

    def __init__(
        self,
        app: App,
        path: Path,
        config: Path,
        stuck_limit_s: float = STUCK_LIMIT_S,
    ) -> None:
        """Serve on a socket at ``path``; ``config`` is the ``serving.json`` that ``reload drafts``
        reads again. A loop that is in one step for ``stuck_limit_s`` hangs.
        """
        self._stuck_limit_s = stuck_limit_s
        self._app = app
        self._path = path
        self._config = config
        self._reloading = threading.Lock()
        self.replies = Replies(path.with_suffix(".logits"), app.tokenizer)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._wake_sent = False
        self._is_on_hold = False
        self._dirty: deque[StubConnection] = deque()
        self.connections: set[StubConnection] = set()
        self._tokenizers = ThreadPoolExecutor(1, "tokenizer")
        self._long_texts = ThreadPoolExecutor(1, "long-texts")
        self.guided: GuidedQueue[Ticket] = GuidedQueue(app, self._tokenise)
        """Requests whose grammars are read before the loop gets them."""
        self._started_s = monotonic()
        self._drain_until_s: float | None = None
        self._ends = False

    def post(self, connection: StubConnection, message: IpcMessage) -> None:
        """Send a message when the IO thread next runs."""
        connection.frames.append(frame(message))
        self._dirty.append(connection)
        if not self._is_on_hold:  # read after the append: one of the two threads sees the other's
            self._wake()

    def hold(self, is_on_hold: bool) -> None:
        """Let posted messages wait until this is called with False (the loop's thread). Else the IO
        thread would take the interpreter from a loop that has its next step to plan.
        """
        self._is_on_hold = is_on_hold
        if not is_on_hold and self._dirty:
            self._wake()

    def _wake(self) -> None:
        if not self._wake_sent:
            self._wake_sent = True
            self._waker.send(b"x")

    def finish(self, trace: RequestTrace) -> None:
        """Take the trace of a request that has ended (any thread)."""
        self._app.tracing.finish(trace)

    @property
    def drains(self) -> bool:
        """Whether new requests are refused."""
        return self._drain_until_s is not None

    def drain(self, limit_s: float, *, ends: bool) -> None:
        """Refuse new requests; the others have ``limit_s`` to end, from the first call on. A call
        with a shorter limit shortens it. With ``ends``, ``serve`` returns when they have.
        """
        until_s = monotonic() + limit_s
        self._drain_until_s = min(self._drain_until_s or until_s, until_s)
        self._ends = self._ends or ends

    def serve(self) -> bool:
        """Serve until drained; False when the loop ended by itself or hangs.

        The socket file appears complete, by a rename.
        """
        listener = self._listen()
        stop = threading.Event()
        loop = threading.Thread(target=self._app.loop.run, args=(stop,), name="loop", daemon=True)
        self._app.loop.preparing = self.guided.__len__
        self._app.loop.hold_replies = self.hold
        loop.start()
        next_stats_s = monotonic()
        while not self._is_done() and self._is_well(loop):
            for key, events in self._selector.select(timeout=0.1):
                self._handle(key, events)
            self._flush_dirty()
            if monotonic() >= next_stats_s:
                next_stats_s = monotonic() + STATS_PERIOD_S
                self._send_stats()
                self._end_late_requests()
                self.guided.end_over()
        well = self._is_well(loop)
        self._path.unlink(missing_ok=True)
        listener.close()
        stop.set()
        self._app.loop.wake()
        loop.join(timeout=5.0)
        self.guided.close()
        for threads in (self._tokenizers, self._long_texts):
            threads.shutdown(wait=False, cancel_futures=True)
        self._send_stats()
        self._flush_dirty()
        self.replies.close()
        return well

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unready = self._path.with_suffix(".new")  # not longer than a path that just fits
        unready.unlink(missing_ok=True)
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(16)
        listener.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        unready.rename(self._path)
        return listener

    def _is_well(self, loop: threading.Thread) -> bool:
        stuck_s = monotonic() - self._app.loop.alive_s
        if loop.is_alive() and stuck_s > self._stuck_limit_s:
            logger.error("the loop is stuck: one step has taken %.0f s so far", stuck_s)
        return loop.is_alive() and stuck_s <= self._stuck_limit_s

    def _is_done(self) -> bool:
        if self._drain_until_s is None or not self._ends:
            return False
        return monotonic() >= self._drain_until_s or not any(
            c.tickets or c.frames or c.unsent for c in self.connections
        )

    def _end_late_requests(self) -> None:
        """End what is in flight after the time of a drain."""
        if self._drain_until_s is not None and monotonic() >= self._drain_until_s:
            loop = self._app.loop
            loop.between_steps(partial(loop.abort, ErrorCode.UNAVAILABLE, SHUTTING_DOWN))

    # -- sockets

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        connection: StubConnection | None = key.data
        if connection is not None:
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(connection)
                if events & selectors.EVENT_READ:
                    self._read(connection)
            except (OSError, FrameError, ProtocolVersionError) as error:
                self._drop(connection, error)
            except Exception as error:
                logger.exception("failed to handle a message: closed its connection")
                self._drop(connection, error)
        elif key.fileobj is self._woken:
            self._woken.recv(4096)
            # after reading, or the byte of a post in between would be lost; that post is flushed
            # below anyway
            self._wake_sent = False
        else:
            self._accept(key.fileobj)

    def _accept(self, listener: Any) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        connection = StubConnection(sock)
        self.connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self.post(connection, Hello(info=self._info()))

    def _read(self, connection: StubConnection) -> None:
        data = connection.sock.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the stub closed the connection")
        for message in connection.frames_in.feed(data):
            self.receive(connection, message)

    def _flush_dirty(self) -> None:
        while self._dirty:
            connection = self._dirty.popleft()  # once for each frame; the first flush takes all
            if connection.frames and connection in self.connections:
                try:
                    self._flush(connection)
                except OSError as error:
                    self._drop(connection, error)

    def _flush(self, connection: StubConnection) -> None:
        connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: StubConnection, error: Exception) -> None:
        """Forget a connection and cancel its requests."""
        logger.info("connection closed: %s", error)
        self.connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for ticket in list(connection.tickets.values()):
            ticket.cancelled = True
        self._app.loop.wake()

    # -- messages

    def receive(self, connection: StubConnection, message: IpcMessage) -> None:
        """Take a message of a stub: the first must greet."""
        if not connection.greeted:
            check_hello(message)
            connection.greeted = True
            return
        match message:
            case Submit():
                self._submit(connection, message)
            case Cancel():
                ticket = connection.tickets.get(message.id)
                if ticket is not None:  # else its last reply has just crossed the cancellation
                    ticket.cancelled = True
                    self._app.loop.wake()
            case Admin():
                self._command(connection, message)
            case Encode():
                size = sum(map(len, (*message.prompts, *message.words)))
                self._threads(size).submit(self._convert, connection, message)
            case Decode():
                size = sum(map(len, message.tokens))
                self._threads(size).submit(self._convert, connection, message)
            case Subscribe():
                connection.subscribed = True
            case _:
                raise ProtocolVersionError(f"a stub sends no {type(message).__name__}")

    def _submit(self, connection: StubConnection, message: Submit) -> None:
        trace = self._app.tracing.begin(message.trace)
        ticket = Ticket(self, connection, message.id, trace)
        connection.tickets[message.id] = ticket
        if self.drains:
            ticket.error(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        elif self.guided.takes(message.request):
            self.guided.add(ticket, message.request)
        else:
            threads = self._threads(len(message.request.text_input))
            threads.submit(self._tokenise, ticket, message.request)

    def _threads(self, characters: int) -> ThreadPoolExecutor:
        """Return where texts of this many characters are prepared."""
        return self._long_texts if characters > LONG_TEXT_CHARACTERS else self._tokenizers

    def _tokenise(self, ticket: Ticket, request: GenerationRequest) -> None:
        """Make a session of a request and hand it to the loop (a tokeniser thread)."""
        try:
            if ticket.cancelled:  # with its client, or with a request of the same body
                raise RequestError(ErrorCode.CANCELLED, CANCELLED)
            session = self._app.session(request, ticket)
            if ticket.trace is not None:
                session.trace = ticket.trace
                session.trace.attributes |= {
                    "gen_ai.request.max_tokens": session.request.max_tokens,
                    "spindle.control": session.control,
                }
                session.trace.enter("queue")
            self._app.loop.submit(session, ticket.arrived_s)
        except RequestError as error:
            ticket.error(error.code, error.message)
        except Exception as error:
            logger.exception("a request could not be prepared")
            ticket.error(
                ErrorCode.INTERNAL, f"the request could not be prepared ({type(error).__name__})"
            )

    def _convert(self, connection: StubConnection, message: Encode | Decode) -> None:
        """Answer those who tokenise for themselves (a tokeniser thread)."""
        if connection not in self.connections:
            return
        reply: IpcMessage
        try:
            if isinstance(message, Encode):
                reply = encode_texts(self._app.preparation, message)
            else:
                reply = decode_tokens(self._app.preparation, message)
        except RequestError as error:
            reply = ErrorReply(id=message.id, code=error.code, message=error.message)
        except Exception as error:
            logger.exception("a text could not be converted")
            reason = f"it could not be converted ({type(error).__name__})"
            reply = ErrorReply(id=message.id, code=ErrorCode.INTERNAL, message=reason)
        self.post(connection, reply)

    def _command(self, connection: StubConnection, message: Admin) -> None:
        """Answer a command: what takes time, on a thread of its own."""
        slow: dict[str, Callable[[], dict[str, Any]]] = {
            "reload drafts": self._reload,
            "explain": self._app.explain,
        }
        name = " ".join(message.command.split())
        if (work := slow.get(name)) is None:
            self._answer(connection, message.id, partial(self._admin, message.command))
            return
        arguments = (connection, message.id, work)
        threading.Thread(target=self._answer, args=arguments, name=name, daemon=True).start()

    def _answer(
        self, connection: StubConnection, request_id: int, work: Callable[[], dict[str, Any]]
    ) -> None:
        """Reply to a command of the administrative interface (any thread)."""
        try:
            self.post(connection, AdminReply(id=request_id, reply=work()))
            return
        except RequestError as error:
            code, message = error.code, error.message
        except ConfigError as error:
            code, message = ErrorCode.INVALID_ARGUMENT, str(error)
        except Exception as error:  # whatever is wrong, the service goes on as it is
            logger.exception("a command failed")
            code = ErrorCode.INTERNAL
            message = f"the command failed: {error or type(error).__name__}"
        self.post(connection, ErrorReply(id=request_id, code=code, message=message))

    def _admin(self, command: str) -> dict[str, Any]:
        """Return the reply to a command that takes no time. Raises ConfigError or RequestError."""
        match command.split():
            case ["health"]:
                return self._health()
            case ["switches"]:
                return self._app.switches.show()
            case ["learned"]:
                return self._app.learned_state.show()
            case ["set", *words]:
                return self._app.switches.set(words)
        commands = "health, learned, explain, switches, set key=value ..., reload drafts"
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"unknown command {command!r}; known: {commands}"
        )

    def _reload(self) -> dict[str, Any]:
        """Take the drafts of the configuration file up (a thread of its own). Raises what is wrong
        with them.
        """
        if not self._reloading.acquire(blocking=False):
            raise RequestError(ErrorCode.UNAVAILABLE, "drafts are being reloaded already")
        try:
            return dict(reload_drafts(self._app, load_config(self._config)))
        finally:
            self._reloading.release()

    def _health(self) -> dict[str, Any]:
        active, waiting = self._app.loop.counts()
        now_s, until_s = monotonic(), self._drain_until_s
        return {
            "status": "ok" if until_s is None else "draining",
            "active": active,
            "waiting": waiting,
            "unanswered": sum(len(connection.tickets) for connection in self.connections),
            "uptime_s": round(now_s - self._started_s, 3),
            "drains_for_s": None if until_s is None else round(until_s - now_s, 3),
            "pid": os.getpid(),
            "max_context_tokens": self._app.max_context_tokens,
        }

    def _info(self) -> dict[str, Any]:
        config = self._app.config
        return {
            "target": config.target.model or config.target.engine,
            "drafts": [draft.name for draft in config.drafts],
            "policy": config.policy.kind,
            "max_context_tokens": self._app.max_context_tokens,
            "max_request_s": config.limits.max_request_s,
        }

    def _send_stats(self) -> None:
        subscribers = [connection for connection in self.connections if connection.subscribed]
        if subscribers:  # without one, the figures wait
            self._app.step_stats.export()
            message = StatsUpdate(**self._app.stats.drain()._asdict())
            for connection in subscribers:
                self.post(connection, message)
