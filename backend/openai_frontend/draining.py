"""How the front end ends: it answers until the requests in flight have ended."""

from __future__ import annotations

import threading
from time import monotonic
from types import FrameType

import uvicorn


class DrainingServer(uvicorn.Server):
    """Goes on answering after a signal, ``/health`` by 503, until the requests in flight have
    ended. uvicorn's own would refuse connections at once.
    """

    def __init__(self, config: uvicorn.Config, draining: threading.Event, drain_s: float) -> None:
        """Give requests in flight ``drain_s`` to end. Once ``draining`` is set a signal ends it at
        once.
        """
        super().__init__(config)
        self._draining = draining
        self._drain_s = drain_s
        self._is_ending = False
        self._deadline_s = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; end at once at the second signal."""
        if self._draining.is_set():
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._is_ending = True
        self._deadline_s = monotonic() + self._drain_s
        self._draining.set()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, ten times a second."""
        if self._is_ending:
            is_over = monotonic() >= self._deadline_s or not self.server_state.tasks
            self.should_exit = self.should_exit or is_over
        return await super().on_tick(counter)
