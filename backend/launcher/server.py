"""One run of tritonserver: its options, whether it is well, and its end.

It ends without breaking off answers: its engine refuses new requests, and tritonserver gets SIGTERM
only when no request is left. After SIGTERM Triton closes the connections of new clients without an
answer, and ends what outlasts its exit timeout likewise.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from backend import PROJECT_ROOT, lifeline
from backend.launcher.checks import python_library_folder
from backend.launcher.environment import LaunchSettings
from backend.launcher.output import say
from backend.launcher.processes import (
    command_line,
    descendants,
    is_running,
    kill_all,
)
from backend.launcher.run_folder import packaged_libraries, packaged_triton, socket_in
from backend.loopback import no_proxy, open_url
from backend.machine import machine

GRPC_PING_PERIOD_S = 30
GRPC_PING_TIMEOUT_S = 20
"""A client that is frozen or unreachable answers no ping: its connection is closed, which frees the
responses that wait for it.
"""
CLOSED_APIS = "shared-memory,model-repository,logging,trace"
"""Those that no client needs; flaws of Triton before 25.07 need the first (SECURITY.md)."""
API_HEADER = "spindle-run"
"""The header with which the launcher calls them."""
ANSWER_LIMIT_S = 5.0
POLL_PERIOD_S = 0.1
LATE_LIMIT_S = 5.0
"""Seconds after the time of a drain in which the engine must have ended what is left."""
STUB_NAME = "triton_python_backend_stub"
EXIT_TIMEOUT_S = 12
"""How long tritonserver may take to exit once the engine has no request: its models unload, and
the model ``spindle`` ends the engine.
"""
STOP_LIMIT_S = 13.5
PROBE_PERIOD_S = 2.0
PROBE_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 30.0
"""A service that answers no probe for so long hangs; a hanging engine alone is dealt with sooner,
by the model ``spindle``.
"""


def flags(settings: LaunchSettings, api_secret: str) -> list[str]:
    """Return tritonserver's options for its addresses, its gRPC connections and traces, and those
    that close APIs to requests without a secret in ``API_HEADER``.
    """
    is_ipv6 = ":" in settings.bind
    http_address = f"ipv6:{settings.bind}" if is_ipv6 else settings.bind
    options = {
        "http-address": http_address,
        "grpc-address": f"[{settings.bind}]" if is_ipv6 else settings.bind,
        "metrics-address": http_address,
        "http-port": settings.http_port,
        "grpc-port": settings.grpc_port,
        "metrics-port": settings.metrics_port,
        "grpc-keepalive-time": 1000 * GRPC_PING_PERIOD_S,
        "grpc-keepalive-timeout": 1000 * GRPC_PING_TIMEOUT_S,
        "grpc-http2-max-pings-without-data": 0,
        "grpc-http2-max-ping-strikes": 0,  # clients may ping as often as they want to
        "http-restricted-api": f"{CLOSED_APIS}:{API_HEADER}={api_secret}",
        "grpc-restricted-protocol": f"{CLOSED_APIS}:{API_HEADER}={api_secret}",
    }
    return [*(f"--{name}={value}" for name, value in options.items()), *trace_flags(settings)]


def trace_flags(settings: LaunchSettings) -> list[str]:
    """Return tritonserver's options for traces: none where they go nowhere."""
    url, rate = settings.trace_url, settings.trace_rate
    traces = "mode=opentelemetry", "level=TIMESTAMPS", f"rate={rate}", f"opentelemetry,url={url}"
    return [f"--trace-config={setting}" for setting in traces] if url else []


class StopSignal(threading.Event):
    """Set by the first signal to stop; ``at_once`` is set by a second one."""

    def __init__(self) -> None:
        """Wait for signals, which ``take_signal`` takes."""
        super().__init__()
        self.at_once = threading.Event()

    def take_signal(self, *_: object) -> None:
        """Take a signal."""
        (self.at_once if self.is_set() else self).set()


def drain(settings: LaunchSettings, at_once: threading.Event) -> None:
    """Have the engine refuse new requests, and wait until the others have ended.

    The engine ends those that outlast ``limits.drain_s``, all of them when ``at_once`` is set.
    Returns at once where no engine answers.
    """
    try:
        pid, is_hurried = _health(settings)["pid"], False
        os.kill(pid, signal.SIGUSR1)
        while (health := _health(settings))["unanswered"]:
            if (health["drains_for_s"] or 0.0) < -LATE_LIMIT_S:
                return
            if at_once.is_set() and not is_hurried:
                say("stopping at once: running requests end with an error")
                os.kill(pid, signal.SIGUSR1)
                is_hurried = True
            sleep(POLL_PERIOD_S)
    except (OSError, HTTPException, ValueError, KeyError):
        return  # the engine has ended, or does not serve yet: nothing is in flight


def _health(settings: LaunchSettings) -> dict[str, Any]:
    """Return what the engine says of itself. Raises OSError where it does not answer."""
    url = f"http://{settings.at(settings.http_port)}/v2/models/spindle/generate"
    request = urllib.request.Request(
        url, b'{"command": "health"}', {"Content-Type": "application/json"}
    )
    with open_url(request, ANSWER_LIMIT_S) as response:
        reply: dict[str, Any] = json.loads(json.load(response)["reply"])
    return reply


class TritonServer:
    """A tritonserver process and its tree, from ``start`` to ``stop`` or ``kill``."""

    def __init__(
        self,
        settings: LaunchSettings,
        folder: Path,
        arguments: Sequence[str],
        stop: StopSignal,
        output: IO[bytes] | None = None,
    ) -> None:
        """Run it with further ``arguments``; its log goes to ``output``, else to the terminal."""
        self._at_once = stop.at_once
        self._settings = settings
        self._folder = folder
        self._socket = socket_in(folder)
        self._arguments = arguments
        self._api_secret = secrets.token_urlsafe()
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: dict[int, str] = {}
        self._shm_prefix = ""
        self._answered_s = 0.0
        self._last_probe = ""
        self._ending = threading.Event()

    def start(self) -> None:
        """Start the process."""
        # by its beginning the run folder's end deletes it too
        self._shm_prefix = f"{self._folder.name}_{monotonic():.0f}_"
        self._ending.clear()
        self._process = lifeline.start(
            sys.executable,
            self._command(),
            env=self._environment(),
            cwd=PROJECT_ROOT,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def is_ready(self) -> bool:
        """Return whether all models are loaded and warmed up; from the first time on, the service
        is watched.
        """
        if self._stubs:
            return True
        if not self._probe():
            return False
        assert self._process is not None
        self._stubs = {
            pid: model for pid in descendants(self._process.pid) if (model := _model_of_stub(pid))
        }
        if self._settings.trace_url:
            # its requests are the probes
            self._post("/v2/models/spindle/trace/setting", {"trace_level": ["OFF"]})
        threading.Thread(target=self._keep_probing, name="probe", daemon=True).start()
        return True

    def waits_for(self) -> str:
        """Return what keeps a server that starts from being ready, as far as it shows."""
        return self._last_probe or "tritonserver has not been probed yet"

    def trouble(self) -> str | None:
        """Return what is wrong with the service, None when nothing is."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            return f"tritonserver ended with status {status}"
        for pid, model in self._stubs.items():
            if not is_running(pid):
                return f"the stub process {pid} of model {model} has died"
        if self._stubs and monotonic() - self._answered_s > SILENCE_LIMIT_S:
            return f"the service has answered no probe for {SILENCE_LIMIT_S:.0f} s"
        return None

    def has_crashed(self) -> bool:
        """Return whether a signal has ended tritonserver."""
        return self._process is not None and (self._process.poll() or 0) < 0

    def stop(self) -> None:
        """Let the server finish its requests (``drain``) and end; kill what is left after
        ``STOP_LIMIT_S``.
        """
        process = self._process
        if process is None:
            return
        drain(self._settings, self._at_once)
        tree = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        self._clean_up([*tree, *descendants(process.pid)])

    def kill(self) -> None:
        """End the server at once: clients of a server that has lost a stub get an error instead of
        waiting for ever.
        """
        if self._process is not None:
            self._clean_up(descendants(self._process.pid))

    def _clean_up(self, tree: list[int]) -> None:
        assert self._process is not None
        self._ending.set()
        self._process.kill()
        self._process.wait()
        if survivors := kill_all([*tree, *self._stubs]):
            say(f"processes {survivors} could not be killed")
        for region in machine.shared_memory_folder().glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)
        self._process, self._stubs = None, {}

    def _command(self) -> list[str]:
        triton = packaged_triton()
        options = {
            "model-repository": self._folder / "model_repository",
            "backend-directory": self._folder / "backends",
            "cache-directory": triton / "caches",
            "exit-timeout-secs": EXIT_TIMEOUT_S,
        }
        backend = (
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--backend-config=python,stub-timeout-seconds=120",
        )
        server = [
            str(triton / "bin" / "tritonserver"),
            *(f"--{name}={value}" for name, value in options.items()),
            *backend,
            "--disable-auto-complete-config",
        ]
        return [*server, *flags(self._settings, self._api_secret), *self._arguments]

    def _environment(self) -> dict[str, str]:
        """Return the server's environment: the stub finds its virtual environment through
        ``python3`` on PATH.
        """

        def join(*parts: str | None) -> str:
            return ":".join(filter(None, parts))

        old = os.environ
        return {
            **old,
            "LD_LIBRARY_PATH": join(
                str(python_library_folder()), str(packaged_libraries()), old.get("LD_LIBRARY_PATH")
            ),
            "PATH": join(str(Path(sys.executable).parent), old.get("PATH")),
            "PYTHONPATH": join(str(PROJECT_ROOT), old.get("PYTHONPATH")),
            "SPINDLE_CONFIG": str(self._settings.config),
            "SPINDLE_SOCKET": str(self._socket),
            "KV_EVENTS": self._settings.kv_events,
            "no_proxy": no_proxy(old),  # a collector of traces may be on this machine
            "SPINDLE_PYTHON": self._settings.engine_python or sys.executable,
            **(
                {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self._settings.trace_url}
                if self._settings.trace_url
                else {}
            ),
        }

    def _keep_probing(self) -> None:
        while not self._ending.wait(PROBE_PERIOD_S):
            self._probe()

    def _probe(self) -> bool:
        """Ask for the engine's health; any answer counts as life, only a good one as readiness."""
        good = self._post("/v2/models/spindle/generate", {"command": "health"})
        if good is not None:
            self._answered_s = monotonic()
        return bool(good)

    def _post(self, path: str, body: dict[str, Any]) -> bool | None:
        """Return whether the server answers a POST well; None when it does not answer."""
        at = self._settings.at(self._settings.http_port)
        request = urllib.request.Request(
            f"http://{at}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", API_HEADER: self._api_secret},
        )
        try:
            with open_url(request, PROBE_TIMEOUT_S) as response:
                response.read()
                return True
        except urllib.error.HTTPError as error:
            self._last_probe = f"tritonserver answers {error.code}: {error.read(200).decode()}"
            return False
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ConnectionRefusedError):
                self._last_probe = f"tritonserver loads the models, {at} is not open yet"
            else:
                self._last_probe = f"tritonserver runs, but does not answer on {at}: {reason}"
            return None


def _model_of_stub(pid: int) -> str | None:
    """Return the model that a stub process serves, from its command line; None for another
    process.
    """
    arguments = command_line(pid)
    if not arguments or Path(arguments[0]).name != STUB_NAME:
        return None
    return next(
        (
            Path(argument).parent.parent.name
            for argument in arguments
            if argument.endswith("model.py")
        ),
        "unknown",
    )
