"""How the front end ends: it answers until the requests in flight have ended."""

from __future__ import annotations

import threading
from time import monotonic
from types import FrameType

import uvicorn

GRACE_S = 10.0
"""How long requests in flight may take to end."""


class DrainingServer(uvicorn.Server):
    """Goes on answering after a signal, ``/health`` by 503, until the requests in flight have
    ended. uvicorn's own would refuse connections at once.
    """

    def __init__(self, config: uvicorn.Config, draining: threading.Event) -> None:
        super().__init__(config)
        self._draining = draining
        self._deadline_s = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; end at once at the second signal."""
        if self._draining.is_set():
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._deadline_s = monotonic() + GRACE_S
        self._draining.set()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, ten times a second."""
        if self._draining.is_set():
            is_over = monotonic() >= self._deadline_s or not self.server_state.tasks
            self.should_exit = self.should_exit or is_over
        return await super().on_tick(counter)
