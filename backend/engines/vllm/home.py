"""The engine process's end of the connection to the planner, which runs in vLLM's scheduler, in
another process: metrics come home, switches and questions go there (``backend.hosts.home``).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from backend.engines.hosted import HostedService

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks for changed switches and new questions."""
ANSWER_S = 10.0
"""The most seconds that a question waits for its answer."""


class PlannerConnection:
    """Serves one planner. It listens at once, and ends when the planner does."""

    def __init__(self, service: HostedService) -> None:
        self._service = service
        self._folder = Path(tempfile.mkdtemp(prefix="spindle-planner-"))
        self.path = str(self._folder / "socket")
        self._listener = Listener(self.path, "AF_UNIX")
        self._questions: deque[tuple[str, Future[dict[str, Any]]]] = deque()
        self._plans = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def wait_for_plans(self, timeout_s: float) -> bool:
        """Wait until the planner has its latencies; return whether it has."""
        return self._plans.wait(timeout_s)

    def ask(self, question: str) -> dict[str, Any]:
        """Return the planner's answer to ``explain`` or ``learned`` (any thread). Raises
        TimeoutError where there is none.
        """
        answer: Future[dict[str, Any]] = Future()
        self._questions.append((question, answer))
        return answer.result(ANSWER_S)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError, EOFError), self._listener.accept() as planner:
            self._serve(planner)
        logger.info("the planner has ended")

    def _serve(self, planner: Connection) -> None:
        answers: deque[Future[dict[str, Any]]] = deque()
        switches = None
        while True:
            if (now := self._service.switches()) != switches:
                planner.send(("switches", now))
                switches = now
            while self._questions:
                question, answer = self._questions.popleft()
                planner.send(("question", question))
                answers.append(answer)
            if not planner.poll(LOOK_S):
                continue
            kind, content = planner.recv()
            if kind == "answer":
                answers.popleft().set_result(content)
            elif kind == "plans":
                self._plans.set()
            else:
                self._count(*content)

    def _count(self, counters: Any, observations: Any, gauges: Any) -> None:
        """Add what the planner has counted since the last time."""
        meters = self._service.meters
        for name, labels, amount in counters:
            meters.count(name, amount, **labels)
        for name, labels, values in observations:
            meters.observe(name, *values, **labels)
        for name, labels, value in gauges:
            meters.gauge(name, value, **labels)
