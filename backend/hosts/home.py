"""The planner's end of the connection to Spindle's engine process, where vLLM is the target there
(``backend.engines.vllm.home``): metrics go home, switches and questions come from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from time import monotonic
from typing import Any

from backend.hosts.adapter import Host
from backend.ops.stats import Stats
from backend.speculation.explaining import explain_last

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Seconds between two sendings of metrics."""
LOOK_S = 0.1
"""Seconds that a message from home may wait for others to be sent."""


class EngineConnection:
    """Speaks with the engine process, from a thread that ends with the process."""

    def __init__(self, path: str, stats: Stats, host: Host) -> None:
        """Connect to the engine process. Raises OSError where it has gone."""
        self._connection: Connection = Client(path, "AF_UNIX")
        self._stats, self._host = stats, host
        self._is_planning = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spindle-home", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what was counted, and end."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._speak()
        except (OSError, EOFError) as error:
            logger.info("spindle: the engine process has gone: %r", error)

    def _speak(self) -> None:
        sent_s = 0.0
        while not self._stop.is_set():
            if self._connection.poll(LOOK_S):
                self._take(*self._connection.recv())
            if not self._is_planning and self._host.has_plans:
                self._is_planning = True
                self._connection.send(("plans", None))
            if monotonic() - sent_s > PERIOD_S:
                sent_s = monotonic()
                self._send_stats()
        self._send_stats()

    def _take(self, kind: str, content: Any) -> None:
        if kind == "switches":
            self._host.switch(content)
            return
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "explain": lambda: explain_last(self._host.cycle),
            "learned": self._host.show_learned,
        }
        try:
            answer = answers[content]()
        except Exception as error:  # a question must not end the connection
            logger.exception("spindle: %s failed", content)
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._connection.send(("answer", answer))

    def _send_stats(self) -> None:
        for part, ratio in self._host.cycle.runner.drift().items():
            self._stats.gauge("spindle_latency_drift", ratio, part=part)
        self._connection.send(("stats", tuple(self._stats.drain())))
