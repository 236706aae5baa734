"""The OpenAI front end's process next to tritonserver."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from time import monotonic
from typing import IO

from backend.launcher.say import say
from backend.launcher.settings import Settings
from backend.launcher.side_process import SideProcess
from backend.triton_adapter.paths import PROJECT_ROOT

MODULE = "backend.openai_frontend"
STOP_LIMIT_S = 5.0


class FrontEnd(SideProcess):
    """Runs from ``start``, once there is something to ask, to ``stop``."""

    def __init__(
        self, settings: Settings, output: IO[bytes] | None = None, python: str = sys.executable
    ) -> None:
        """Run it with these settings by the interpreter ``python``; its log goes to ``output``, by
        default to the terminal.
        """
        super().__init__(
            "the OpenAI front end",
            [python, "-m", MODULE],
            folder=PROJECT_ROOT,
            environment={
                "SPINDLE_CONFIG": str(settings.config),
                "SERVED_MODEL_NAME": ",".join(settings.model_names),
                "BIND": settings.bind,
                "OPENAI_ALLOWED_HOSTS": ",".join(settings.allowed_hosts),
            },
            stop_limit_s=STOP_LIMIT_S,
            output=output,
        )
        self._settings = settings
        self._listens = threading.Event()

    def start(self) -> None:
        """Start it unless it runs, or is not wanted."""
        if self._settings.openai_port:
            super().start()

    @property
    def url(self) -> str:
        """The address of the status page; the API is below it."""
        return f"http://{self._settings.at(self._settings.openai_port)}"

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
        self.signal(signal.SIGUSR1)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """Note when it answers, and say so of one that was started again."""
        address = self._settings.client_host, self._settings.openai_port
        while process.poll() is None and not self._ended.is_set():
            try:
                socket.create_connection(address, timeout=1.0).close()
            except OSError:  # noqa: PERF203 (it does not listen yet)
                self._ended.wait(0.1)
            else:
                if self._listens.is_set():
                    say("the OpenAI front end answers again")
                self._listens.set()
                return
