"""The bounded queue in front of the in-flight batch: first come, first served; refusal is a reply,
never a silent drop.

Active and waiting requests together are always in order of arrival: the request that has to give
its KV back is the last of the active ones, and becomes the first to wait. So the oldest request
always goes on, and none is starved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from backend.core.kv_ledger import KVLedger
from backend.core.session import Session
from backend.request import ErrorCode, RequestError


class Admission:
    """Keeps sessions waiting until the batch, the KV cache and the memory for logits have room.

    It also decides which session gives blocks back when they run out. ``max_logits_bytes`` is for
    all that are admitted and have not ended.
    """

    def __init__(
        self, ledger: KVLedger, max_active: int, max_queued: int, max_logits_bytes: float = math.inf
    ) -> None:
        self._ledger = ledger
        self._max_active = max_active
        self._max_queued = max_queued
        self._max_logits_bytes = max_logits_bytes
        self._logits_bytes: dict[int, int] = {}  # by session, of those that have been admitted
        self._queue: deque[Session] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, session: Session) -> None:
        """Queue a session. Raises RequestError when the queue is full or the session could never
        fit.
        """
        if not self._ledger.fits_ever(_life_tokens(session)):
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"max_tokens {session.request.max_tokens} and a prompt of "
                f"{session.sequence.prompt_tokens} tokens need more KV cache than this server has",
            )
        if len(self._queue) >= self._max_queued:
            raise RequestError(
                ErrorCode.UNAVAILABLE, f"Exceeds maximum queue size {self._max_queued}"
            )
        self._queue.append(session)

    def admit(self, active: int) -> list[Session]:
        """Return the sessions that join a batch of ``active`` requests now, their KV reserved."""
        admitted: list[Session] = []
        while self._queue and active + len(admitted) < self._max_active:
            session = self._queue[0]
            if not (
                self._has_room_for_logits(session)
                and self._ledger.reserve(session.sequence, _life_tokens(session))
            ):
                break  # the head waits; letting smaller ones pass could starve it
            if session.logits_bytes:
                self._logits_bytes[session.id] = session.logits_bytes
            admitted.append(self._queue.popleft())
        return admitted

    def release(self, session: Session) -> None:
        """Give back what an admitted session keeps in memory until it ends, also while it is
        pre-empted.
        """
        self._logits_bytes.pop(session.id, None)

    def make_room(self, active: Iterable[Session]) -> list[Session]:
        """Extend the KV of ``active`` (in order of admission) for its next step; return the
        sessions that lost theirs for it, and wait now.

        They are resumed by another prefill, of prompt and generated tokens.
        """
        running = list(active)
        preempted: list[Session] = []
        ready = 0
        while ready < len(running):
            if self._ledger.grow(running[ready].sequence):
                ready += 1
            else:
                last = running.pop()
                self._ledger.release(last.sequence)
                self._queue.appendleft(last)
                preempted.append(last)
        return preempted

    def remove(self, is_over: Callable[[Session], bool]) -> list[Session]:
        """Take out and return the waiting sessions that ``is_over`` is true of."""
        over = [session for session in self._queue if is_over(session)]
        if over:
            ids = {session.id for session in over}  # asked once: a client may go at any moment
            self._queue = deque(session for session in self._queue if session.id not in ids)
        return over

    def check(self, active: Iterable[Session]) -> None:
        """Raise RuntimeError unless the active and then the waiting sessions are in order of
        arrival, and those that wait have no KV.
        """
        arrivals = [session.arrived_s for session in (*active, *self._queue)]
        if arrivals != sorted(arrivals):
            raise RuntimeError(f"requests that arrived at {arrivals} are not in order of arrival")
        if holding := [session.id for session in self._queue if session.sequence.blocks]:
            raise RuntimeError(f"requests {holding} wait and have KV blocks")

    def _has_room_for_logits(self, session: Session) -> bool:
        if not session.logits_bytes or session.id in self._logits_bytes:
            return True
        return sum(self._logits_bytes.values()) + session.logits_bytes <= self._max_logits_bytes

    def clear(self) -> list[Session]:
        """Take out and return everything that waits."""
        waiting, self._queue = list(self._queue), deque()
        return waiting


def _life_tokens(session: Session) -> int:
    return session.sequence.prompt_tokens + session.request.max_tokens
