"""The OpenAI front end's process next to tritonserver: started once there is something to ask,
started again when it ends by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from time import monotonic
from typing import IO

from backend import lifeline
from backend.launcher.say import say
from backend.launcher.settings import Settings
from backend.triton_adapter.paths import PROJECT_ROOT

BACKOFF_S = 1.0
STOP_LIMIT_S = 5.0


class FrontEnd:
    """Runs from ``start`` to ``stop``."""

    def __init__(
        self, settings: Settings, output: IO[bytes] | None = None, python: str = sys.executable
    ) -> None:
        """Run it with these settings by the interpreter ``python``; its log goes to ``output``, by
        default to the terminal.
        """
        self._python = python
        self._settings = settings
        self._output = output
        self._listens = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs, or is not wanted."""
        if self._settings.openai_port and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="front-end", daemon=True)
            self._thread.start()

    @property
    def url(self) -> str:
        """Where the status page is; the API is below it."""
        return f"http://{self._settings.client_host}:{self._settings.openai_port}"

    @property
    def listens(self) -> bool:
        """Whether it has answered."""
        return self._listens.is_set()

    def wait(self, stop: threading.Event, limit_s: float) -> None:
        """Wait until it answers, at most this many seconds or until ``stop`` is set."""
        deadline_s = monotonic() + limit_s
        while not (self.listens or stop.is_set()) and monotonic() < deadline_s:
            self._listens.wait(0.1)

    def refuse(self) -> None:
        """Answer new requests by 503 until ``stop``; those in flight may end."""
        self._stop.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        """End it, at the latest after ``STOP_LIMIT_S``."""
        self._stop.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        command = [self._python, "-m", "backend.openai_frontend"]
        environment = {**os.environ, "SPINDLE_CONFIG": str(self._settings.config)}
        while not self._stop.is_set():
            self._process = lifeline.start(
                self._python,
                command,
                cwd=PROJECT_ROOT,
                env=environment,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            if self._stop.is_set():
                self._process.terminate()
            self._see_it_listen(self._process)
            status = self._process.wait()
            if not self._stop.is_set():
                say(
                    f"the OpenAI front end ended with status {status}: starting it again in "
                    f"{BACKOFF_S:g} s"
                )
            self._stop.wait(BACKOFF_S)

    def _see_it_listen(self, process: subprocess.Popen[bytes]) -> None:
        """Note when it answers, and say so of one that was started again."""
        address = self._settings.client_host, self._settings.openai_port
        while process.poll() is None and not self._stop.is_set():
            try:
                socket.create_connection(address, timeout=1.0).close()
            except OSError:  # noqa: PERF203 (it does not listen yet)
                self._stop.wait(0.1)
            else:
                if self._listens.is_set():
                    say("the OpenAI front end answers again")
                self._listens.set()
                return
