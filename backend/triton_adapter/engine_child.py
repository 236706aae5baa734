"""The engine process as a child of the ``spindle`` stub: started, watched, restarted, drained."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from backend import PROJECT_ROOT, lifeline
from backend.triton_adapter.stub import engine_python

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 10.0
STABLE_S = 30.0
"""Time after which an engine that serves has not failed quickly, in seconds."""
QUICK_FAILURES = 5
"""Quick failures in a row after which no engine is started."""


class EngineChild:
    """Keeps one engine process alive from ``start`` to ``stop``.

    ``give_up`` is called when it fails ``QUICK_FAILURES`` times in quick succession.
    """

    def __init__(
        self,
        config: Path,
        socket: Path,
        give_up: Callable[[], None],
        *,
        first_backoff_s: float = FIRST_BACKOFF_S,
        stable_s: float = STABLE_S,
    ) -> None:
        self._first_backoff_s, self._stable_s = first_backoff_s, stable_s
        self._arguments = ["--config", str(config), "--socket", str(socket)]
        self._give_up = give_up
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._came_up = False
        self._ready_s: float | None = None
        self._restarts = 0
        self._failed_first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-child", daemon=True)

    def start(self) -> None:
        """Start the process and the watch over it."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until no process is started any more."""
        self._thread.join(timeout_s)

    @property
    def failed_to_start(self) -> bool:
        """Whether the very first process ended before ``ready`` was called."""
        return self._failed_first.is_set()

    def ready(self) -> None:
        """Note that the engine answers: from now on its death is followed by a restart."""
        self._came_up = True
        if self._ready_s is None:
            self._ready_s = monotonic()

    def take_restarts(self) -> int:
        """Return how many engines were started again since the last call."""
        restarts, self._restarts = self._restarts, 0
        return restarts

    def kill(self) -> None:
        """Kill a process that no longer answers; the watch restarts it."""
        if self._process is not None:
            self._process.kill()

    def stop(self, limit_s: float) -> None:
        """Let the process finish its requests and end; kill it after ``limit_s``."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process did not end within %.0f s: killed", limit_s)
            process.kill()
            process.wait()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._ready_s = None
            status = self._run_once()
            if self._stopping.is_set():
                return
            text = f"the engine process ended with status {status}"
            if not self._came_up:
                logger.error("%s before it was ready", text)
                self._failed_first.set()
                return
            is_stable = self._ready_s is not None and monotonic() - self._ready_s >= self._stable_s
            failures = 1 if is_stable else failures + 1
            if failures >= QUICK_FAILURES:
                logger.error("%s; failure %d in quick succession: giving up", text, failures)
                self._give_up()
                return
            backoff_s = min(self._first_backoff_s * 2 ** (failures - 1), LONGEST_BACKOFF_S)
            logger.error("%s: restarting in %g s", text, backoff_s)
            self._stopping.wait(backoff_s)
            self._restarts += 1

    def _run_once(self) -> int:
        """Run the process to its end and return its status."""
        python = engine_python()
        self._process = lifeline.start(
            python,
            [python, "-m", "backend.engine_process", *self._arguments],
            cwd=PROJECT_ROOT,
            env=engine_environment(),
            start_new_session=True,
        )
        logger.info("engine process %d started", self._process.pid)
        return self._process.wait()


def engine_environment() -> dict[str, str]:
    """Return the engine's environment: the project on the path, Triton's own libraries off it,
    numpy's matrices on one thread.

    The policy's matrices have a few rows; for those OpenBLAS wakes a thread that spins half of the
    time, on a core that Triton could use.
    """
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
    libraries = [
        folder
        for folder in environment.get("LD_LIBRARY_PATH", "").split(":")
        if folder and "pytriton" not in folder
    ]
    environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    environment["PYTHONPATH"] = ":".join(
        filter(None, [str(PROJECT_ROOT), environment.get("PYTHONPATH")])
    )
    return environment
