"""A process next to tritonserver: started again when it ends by itself."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from backend import lifeline
from backend.launcher.processes import end
from backend.launcher.say import say

BACKOFF_S = 1.0


class SideProcess:
    """Keeps a process running from ``start`` to ``stop``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stop_limit_s: float,
        output: IO[bytes] | None = None,
    ) -> None:
        """Run a command in a folder with this environment besides the launcher's own.

        ``name`` is what messages call it; its log goes to ``output``, by default to the terminal.
        """
        self._name = name
        self._command = command
        self._folder = folder
        self._environment = environment
        self._stop_limit_s = stop_limit_s
        self._output = output
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs."""
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def signal(self, number: int) -> None:
        """Send a signal, and start it no more."""
        self._ended.set()
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """End it by SIGTERM; kill it after its time."""
        self._ended.set()
        if self._process is not None:
            end(self._process, self._stop_limit_s)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """Look at a process that has just been started."""

    def _run(self) -> None:
        while not self._ended.is_set():
            self._process = lifeline.start(
                self._command[0],
                self._command,
                cwd=self._folder,
                env={**os.environ, **self._environment},
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            if self._ended.is_set():
                self._process.terminate()
            self.started(self._process)
            status = self._process.wait()
            if not self._ended.is_set():
                text = f"{self._name} ended with status {status}"
                say(f"{text}: starting it again in {BACKOFF_S:g} s")
            self._ended.wait(BACKOFF_S)
