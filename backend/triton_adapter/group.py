"""One Triton request that became several of ours (a batch, or several texts): its responses go out
as they come, its final flag once.
"""

from __future__ import annotations

import threading

from backend.request import ErrorCode
from backend.triton_adapter.codec import Array
from backend.triton_adapter.sender import ResponseSender


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
        """Send a part's outputs; the last of the parts to end carries the final flag."""
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
