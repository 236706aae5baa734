"""Replies to Triton, sent from a few threads: ``send`` costs 0.13 ms and ``is_cancelled`` 0.04 ms,
so neither may be on a path of others.

Requests are sharded by id, which keeps the order within a stream. Everything about a request is
owned by its shard's thread, so that exactly one final reply is a matter of popping it from one
dict.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Protocol

from backend.ipc.messages import Chunk, ErrorReply, Final
from backend.request import ErrorCode
from backend.triton_adapter.codec import (
    Array,
    WantedOutputs,
    encode_chunk,
    encode_final,
    load_arrays,
)

logger = logging.getLogger(__name__)

SHARDS = 4
CANCELLATION_CHECK_PERIOD_S = 0.075
GIVE_UP_S = 60.0
"""How long a last response that cannot be sent is tried again."""
UNSENT = (ErrorCode.INTERNAL, "the reply could not be sent")


class ResponseSender(Protocol):
    """One Triton request's way back (``pb_utils.InferenceResponseSender`` wrapped for
    ``responder.Responder``).
    """

    def send(self, outputs: dict[str, Array], *, final: bool) -> None:
        """Send outputs, [batch, ...] by name."""
        ...

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether the client has gone."""
        ...


@dataclass(slots=True)
class PendingReply:
    """A request that has not had its final reply yet; ``deltas`` came since its last response.

    ``deadline_s`` (monotonic) backs up the engine's own limit: no client waits for an engine that
    lost its request. ``failure`` is the error that ends the request when its last response could
    not be sent; ``client_id`` is the client's own id of the request.
    """

    id: int
    sender: ResponseSender
    wanted: WantedOutputs
    deadline_s: float = math.inf
    failure: tuple[ErrorCode, str] | None = None
    client_id: str = ""
    deltas: list[Chunk] = field(default_factory=list)


class Senders:
    """Turns the engine's messages into responses. All methods return at once and may be called from
    any thread.
    """

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self._shards = [_Shard(cancel, index) for index in range(SHARDS)]

    def open(self, reply: PendingReply) -> None:
        """Take a request over; call it before its messages can arrive."""
        self._shard(reply.id).put(reply)

    def deliver(self, message: Chunk | ErrorReply) -> None:
        """Pass on a chunk, final or error; one for a request that has had its final reply is
        dropped.
        """
        self._shard(message.id).put(message)

    def fail(self, request_id: int, code: ErrorCode, message: str) -> None:
        """End a request by an error."""
        self.deliver(ErrorReply(id=request_id, code=code, message=message))

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every request opened so far by an error."""
        for shard in self._shards:
            shard.put(_All(ErrorReply(code=code, message=message)))

    def stop(self, client_id: str) -> None:
        """End the requests that a client calls so, successfully, with what there is of them."""
        for shard in self._shards:
            shard.put(_StopByClientId(client_id))

    def close(self) -> None:
        """End the threads once everything put so far is sent."""
        for shard in self._shards:
            shard.close()

    def _shard(self, request_id: int) -> _Shard:
        return self._shards[request_id % len(self._shards)]


@dataclass(frozen=True, slots=True)
class _All:
    """The error that ends every open request."""

    message: ErrorReply


@dataclass(frozen=True, slots=True)
class _StopByClientId:
    """Ends the requests that a client calls so."""

    client_id: str


Item = PendingReply | Chunk | ErrorReply | _All | _StopByClientId


class _Shard:
    """One sender thread and the requests it owns."""

    def __init__(self, cancel: Callable[[int], None], index: int) -> None:
        self._cancel = cancel
        self._open: dict[int, PendingReply] = {}
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._next_check_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"sender-{index}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        self._inbox.put(item)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            batch = self._wait_for_items()
            for item in batch:
                if item is None:
                    return
                self._guard(self._handle, item)
            for request_id in {item.id for item in batch if type(item) is Chunk}:
                self._guard(self._flush, request_id)
            if monotonic() >= self._next_check_s:
                self._next_check_s = monotonic() + CANCELLATION_CHECK_PERIOD_S
                for request_id in list(self._open):
                    self._guard(self._check, request_id)

    def _wait_for_items(self) -> list[Item | None]:
        """Return all that has arrived: a thread that is late sends a stream's waiting deltas as
        one response.
        """
        try:
            batch = [self._inbox.get(timeout=CANCELLATION_CHECK_PERIOD_S if self._open else None)]
        except queue.Empty:
            return []
        while not self._inbox.empty():
            batch.append(self._inbox.get())
        return batch

    def _handle(self, item: Item) -> None:
        if isinstance(item, PendingReply):
            self._open[item.id] = item
        elif isinstance(item, _All):
            for waiting in list(self._open.values()):
                self._guard(partial(self._give, waiting), item.message)
        elif isinstance(item, _StopByClientId):
            for named in [r for r in self._open.values() if r.client_id == item.client_id]:
                self._guard(self._stop, named)
        else:
            # Also of a request that has gone: else its files would stay.
            message = load_arrays(item) if isinstance(item, Chunk) else item
            if (reply := self._open.get(item.id)) is not None:
                self._give(reply, message)

    def _give(self, reply: PendingReply, message: Chunk | ErrorReply) -> None:
        if reply.failure is not None:
            return
        if isinstance(message, ErrorReply):
            self._fail(reply, message.code, message.message)
        elif isinstance(message, Final):
            final = message
            self._end(
                reply,
                lambda: reply.sender.send(
                    encode_final(final, reply.deltas, reply.wanted), final=True
                ),
            )
        else:
            reply.deltas.append(message)

    def _stop(self, reply: PendingReply) -> None:
        if reply.failure is None:
            self._cancel(reply.id)
            self._end(
                reply,
                lambda: reply.sender.send(encode_chunk(reply.deltas, reply.wanted), final=True),
            )

    def _flush(self, request_id: int) -> None:
        """Send what has come of a stream; what cannot be sent goes with the next response."""
        reply = self._open.get(request_id)
        if reply is not None and reply.deltas and reply.failure is None:
            reply.sender.send(encode_chunk(reply.deltas, reply.wanted), final=False)
            reply.deltas = []

    def _check(self, request_id: int) -> None:
        """End a request whose client has gone or whose deadline has passed, or try again to end
        one.
        """
        reply = self._open[request_id]
        late = monotonic() >= reply.deadline_s
        if reply.failure is not None and late:
            logger.error("request %d got no last response: %s", reply.id, reply.failure[1])
            del self._open[request_id]
        elif reply.failure is not None:
            self._fail(reply, *reply.failure)
        elif reply.sender.is_cancelled():
            self._cancel(request_id)
            self._fail(reply, ErrorCode.CANCELLED, "Request cancelled by client")
        elif late:
            self._cancel(request_id)
            self._fail(reply, ErrorCode.UNAVAILABLE, "the engine has not ended the request in time")

    def _fail(self, reply: PendingReply, code: ErrorCode, message: str) -> None:
        self._end(reply, lambda: reply.sender.fail(code, message), (code, message))

    def _end(
        self, reply: PendingReply, send: Callable[[], None], failure: tuple[ErrorCode, str] = UNSENT
    ) -> None:
        """Send the last response. If that fails (shared memory is full), ``failure`` is tried
        again at every check for a while.
        """
        try:
            send()
        except Exception:
            if reply.failure is None:
                logger.exception("the last response of request %d could not be sent", reply.id)
                reply.failure, reply.deadline_s = failure, monotonic() + GIVE_UP_S
        else:
            del self._open[reply.id]

    @staticmethod
    def _guard(step: Callable[[Any], None], argument: Any) -> None:
        """Run a step; what goes wrong with one request must not end the thread that serves the
        others.
        """
        try:
            step(argument)
        except Exception:
            logger.exception("a reply could not be sent")


class Group:
    """The ``ResponseSender`` that the parts share, from any thread. The first error ends the whole
    request and cancels the rest.
    """

    def __init__(self, sender: ResponseSender, parts: int) -> None:
        self._sender = sender
        self._remaining = parts
        self._failed = False
        self._lock = threading.Lock()

    def send(self, outputs: dict[str, Array], *, final: bool) -> None:
        """Send a part's outputs [1, ...]; the last of the parts to end carries the final flag."""
        with self._lock:
            if not self._failed:
                self._sender.send(outputs, final=final and self._remaining == 1)
                self._remaining -= final

    def fail(self, code: ErrorCode, message: str) -> None:
        """End the whole request by an error, unless one has."""
        with self._lock:
            if not self._failed:
                self._sender.fail(code, message)
                self._failed = True

    def is_cancelled(self) -> bool:
        """Return whether the client has gone or another part has failed."""
        return self._failed or self._sender.is_cancelled()
