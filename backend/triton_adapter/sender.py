"""Replies to Triton, sent from a few threads: ``send`` costs 0.13 ms and ``is_cancelled`` 0.04 ms, so neither may be on a path of others.

Requests are sharded by id, which keeps the order within a stream. Everything about a request is owned by its shard's thread, so that
exactly one final reply is a matter of popping it from one dict.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from backend.request import ErrorCode
from backend.triton_adapter.codec import Array, Wanted, encode_chunk, encode_final
from backend.wire import Message

logger = logging.getLogger(__name__)

SHARDS = 4
CANCELLATION_CHECK_PERIOD_S = 0.075


class ResponseSender(Protocol):
    """One Triton request's way back (``pb_utils.InferenceResponseSender`` behind ``triton.Responder``)."""

    def send(self, outputs: dict[str, Array], *, final: bool) -> None:
        """Send outputs."""
        ...

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether the client has gone."""
        ...


@dataclass(slots=True)
class Reply:
    """A request that has not had its final reply yet; ``deltas`` came since its last response.

    ``deadline_s`` (monotonic) backs up the engine's own limit: no client waits for an engine that lost its request.
    """

    id: int
    sender: ResponseSender
    wanted: Wanted
    deadline_s: float = math.inf
    deltas: list[Message] = field(default_factory=list)


class Senders:
    """Turns the engine's messages into responses. All methods return at once and may be called from any thread."""

    def __init__(self, cancel: Callable[[int], None], shards: int = SHARDS) -> None:
        self._shards = [_Shard(cancel, index) for index in range(shards)]

    def open(self, reply: Reply) -> None:
        """Take a request over; call it before its messages can arrive."""
        self._shard(reply.id).put(reply)

    def deliver(self, message: Message) -> None:
        """Pass on a chunk, final or error; one for a request that has had its final reply is dropped."""
        self._shard(message["id"]).put(message)

    def fail(self, request_id: int, code: ErrorCode, message: str) -> None:
        """End a request by an error."""
        self.deliver({"type": "error", "id": request_id, "code": code.value, "message": message})

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every request opened so far by an error."""
        for shard in self._shards:
            shard.put({"type": "error", "id": None, "code": code.value, "message": message})

    def close(self) -> None:
        """End the threads once everything put so far is sent."""
        for shard in self._shards:
            shard.close()

    def _shard(self, request_id: int) -> _Shard:
        return self._shards[request_id % len(self._shards)]


class _Shard:
    """One sender thread and the requests it owns."""

    def __init__(self, cancel: Callable[[int], None], index: int) -> None:
        self._cancel = cancel
        self._open: dict[int, Reply] = {}
        self._inbox: queue.SimpleQueue[Reply | Message | None] = queue.SimpleQueue()
        self._next_check_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"sender-{index}", daemon=True)
        self._thread.start()

    def put(self, item: Reply | Message) -> None:
        self._inbox.put(item)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            batch = self._take()
            for item in batch:
                if item is None:
                    return
                self._guard(self._handle, item)
            for request_id in {item["id"] for item in batch if isinstance(item, dict) and item["type"] == "chunk"}:
                self._guard(self._flush, request_id)
            if monotonic() >= self._next_check_s:
                self._next_check_s = monotonic() + CANCELLATION_CHECK_PERIOD_S
                for request_id in list(self._open):
                    self._guard(self._check, request_id)

    def _take(self) -> list[Reply | Message | None]:
        """Return all that has arrived: a thread that fell behind sends a stream's waiting deltas as one response."""
        try:
            batch = [self._inbox.get(timeout=CANCELLATION_CHECK_PERIOD_S if self._open else None)]
        except queue.Empty:
            return []
        while not self._inbox.empty():
            batch.append(self._inbox.get())
        return batch

    def _handle(self, item: Reply | Message) -> None:
        if isinstance(item, Reply):
            self._open[item.id] = item
        elif item["id"] is None:
            for request_id in list(self._open):
                self._guard(self._handle, {**item, "id": request_id})
        elif item["type"] == "chunk":
            if (reply := self._open.get(item["id"])) is not None:
                reply.deltas.append(item)
        elif (reply := self._open.pop(item["id"], None)) is not None:
            if item["type"] == "final":
                reply.sender.send(encode_final(item, reply.deltas, reply.wanted), final=True)
            else:
                reply.sender.fail(ErrorCode(item["code"]), item["message"])

    def _flush(self, request_id: int) -> None:
        reply = self._open.get(request_id)
        if reply is not None and reply.deltas:
            deltas, reply.deltas = reply.deltas, []
            reply.sender.send(encode_chunk(deltas), final=False)

    def _check(self, request_id: int) -> None:
        """End a request whose client has gone or whose deadline has passed."""
        reply = self._open[request_id]
        if reply.sender.is_cancelled():
            code, message = ErrorCode.CANCELLED, "Request cancelled by client"
        elif monotonic() >= reply.deadline_s:
            code, message = ErrorCode.UNAVAILABLE, "the engine has not ended the request in time"
        else:
            return
        del self._open[request_id]
        self._cancel(request_id)
        reply.sender.fail(code, message)

    @staticmethod
    def _guard(step: Callable[[Any], None], argument: Any) -> None:
        """Run a step; what goes wrong with one request must not end the thread that serves the others."""
        try:
            step(argument)
        except Exception:
            logger.exception("a reply could not be sent")
