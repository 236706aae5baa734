"""Processes: children and their ends, the tree as /proc has it, and the processes next to
tritonserver, which are started again when they end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from backend import PROJECT_ROOT, lifeline
from backend.config import ServingConfig
from backend.launcher.environment import LaunchError, LaunchSettings, model_names
from backend.launcher.output import say
from backend.sequence import BLOCK_TOKENS

STOP_LIMIT_S = 5.0
"""Seconds that a command has to clear away what it began; the next start can do that, too."""
RUN_REPORT_S = 10.0
"""Seconds between two reports about a command that runs."""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return _running_parent(pid) is not None


def descendants(pid: int) -> list[int]:
    """Return the running processes below one, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _running_parent(int(entry.name))) is not None:
            children[parent].append(int(entry.name))
    found_pids: list[int] = []
    waiting = [pid]
    while waiting:
        below = children[waiting.pop()]
        found_pids += below
        waiting += below
    return found_pids


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process of this user began with; empty for any other."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    pairs = (variable.partition("=") for variable in variables)
    return {name: value for name, _, value in pairs if name}


def listening_process(port: int) -> int:
    """Return the process that listens on a port; 0 if this user can see none."""
    sockets = set(listening_sockets(port))
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(handle) in sockets:
                return int(handle.parts[2])
    return 0


def listening_sockets(port: int) -> Iterator[str]:
    """Yield the sockets that listen on a port, as /proc names them."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text("utf-8").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{words[9]}]"


def run(
    command: Sequence[str],
    stop: threading.Event,
    report: Callable[[float], None] | None = None,  # gets the seconds so far, now and then
) -> int:
    """Run a Python command of ours to its end, or until ``stop`` is set; return its status."""
    process = lifeline.start(sys.executable, command, cwd=PROJECT_ROOT)
    started_s, reports = monotonic(), 1
    while process.poll() is None:
        if stop.wait(0.1):
            end(process, STOP_LIMIT_S)
        elif report is not None and monotonic() - started_s > reports * RUN_REPORT_S:
            report(monotonic() - started_s)
            reports += 1
    return process.wait()


def end(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """End a child by SIGTERM, kill it after ``limit_s``; return its status."""
    process.terminate()
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def kill_all(pids: Iterable[int], limit_s: float = 5.0) -> list[int]:
    """Kill processes, wait for their end, and return those that still run after ``limit_s``."""
    running = list(pids)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline_s = monotonic() + limit_s
    while (running := [pid for pid in running if is_running(pid)]) and monotonic() < deadline_s:
        sleep(0.05)
    return running


def _running_parent(pid: int) -> int | None:
    """Return the parent of a process that runs, None when it has ended (a zombie has)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before it may hold anything
    return None if state in "ZX" else int(parent)


BACKOFF_S = 1.0
FRONT_END = "backend.openai_frontend"
FRONT_END_STOP_LIMIT_S = 5.0
WORKER_PYTHON = PROJECT_ROOT / ".venv-fleet" / "bin" / "python"
WORKER_LEAVE_S = 1.0
"""Seconds in which Dynamo's front ends learn that a worker takes no more requests."""
WORKER_STOP_LIMIT_S = 10.0
"""Longest time for a worker to end once its server has ended, in seconds."""


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
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs."""
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def signal(self, number: int) -> None:
        """Send a signal, and start it no more."""
        self._ending.set()
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """End it by SIGTERM; kill it after its time."""
        self._ending.set()
        if self._process is not None:
            end(self._process, self._stop_limit_s)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def watch_start(self, process: subprocess.Popen[bytes]) -> None:
        """Look at a process that has just been started."""

    def _run(self) -> None:
        while not self._ending.is_set():
            self._process = lifeline.start(
                self._command[0],
                self._command,
                cwd=self._folder,
                env={**os.environ, **self._environment},
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            if self._ending.is_set():
                self._process.terminate()
            self.watch_start(self._process)
            status = self._process.wait()
            if not self._ending.is_set():
                text = f"{self._name} ended with status {status}"
                say(f"{text}: restarting it in {BACKOFF_S:g} s")
            self._ending.wait(BACKOFF_S)


class FrontEndProcess(SideProcess):
    """Runs from ``start``, once there is something to ask, to ``stop``."""

    def __init__(
        self,
        settings: LaunchSettings,
        output: IO[bytes] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Run it with these settings by the interpreter ``python``; its log goes to ``output``, by
        default to the terminal.
        """
        super().__init__(
            "the OpenAI front end",
            [python, "-m", FRONT_END],
            folder=PROJECT_ROOT,
            environment={
                "SPINDLE_CONFIG": str(settings.config),
                "SERVED_MODEL_NAME": ",".join(settings.model_names),
            },
            stop_limit_s=FRONT_END_STOP_LIMIT_S,
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

    def watch_start(self, process: subprocess.Popen[bytes]) -> None:
        """Note when it answers, and say so of one that was started again."""
        address = self._settings.client_host, self._settings.openai_port
        while process.poll() is None and not self._ending.is_set():
            try:
                socket.create_connection(address, timeout=1.0).close()
            except OSError:  # noqa: PERF203 (it does not listen yet)
                self._ending.wait(0.1)
            else:
                if self._listens.is_set():
                    say("the OpenAI front end answers again")
                self._listens.set()
                return


class DynamoWorker(SideProcess):
    """Registers the server with Dynamo from ``start`` to ``leave``."""

    def __init__(
        self,
        settings: LaunchSettings,
        config: ServingConfig,
        folder: Path,
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Run it in a folder that has the package ``backend``. Raises LaunchError."""
        if not config.target.model:
            raise LaunchError("--dynamo needs a model with a tokenizer, got the fake engine")
        if not config.limits.kv_cache_tokens:
            raise LaunchError(
                "--dynamo announces the KV before the engine starts: set limits.kv_cache_tokens, "
                "such as 32768"
            )
        python = environment.get("DYNAMO_PYTHON") or str(WORKER_PYTHON)
        if not os.access(python, os.X_OK):
            raise LaunchError(
                f"--dynamo needs a Python with ai-dynamo, which {python} lacks: make fleet, or "
                "DYNAMO_PYTHON (docs/how-to/fleet.md)"
            )
        from backend.model_folders import model_path  # it imports the policy's compiler

        model, limits = model_path(config.target), config.limits
        options = {
            "address": settings.at(settings.grpc_port),
            "folder": model,
            "name": model_names(settings, config)[0],
            "namespace": settings.dynamo_namespace,
            "block-tokens": BLOCK_TOKENS,
            "kv-blocks": limits.kv_cache_tokens // BLOCK_TOKENS,
            "max-requests": limits.max_active_requests,
            "drain-s": limits.drain_s,
            "kv-events": settings.kv_events.replace("*", "127.0.0.1"),
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        super().__init__(
            "the Dynamo worker",
            [python, "-m", "backend.fleet", *arguments],
            folder=folder,
            environment={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(WORKER_LEAVE_S)},
            stop_limit_s=WORKER_STOP_LIMIT_S,
            output=output,
        )

    def leave(self) -> None:
        """Take no more requests; those in flight may end. ``stop`` waits for that."""
        self.signal(signal.SIGTERM)
        sleep(WORKER_LEAVE_S)


def import_folder(folder: Path) -> Path:
    """Return a folder in ``folder`` that has the package ``backend`` and no others: where this is
    installed its neighbours are of another environment than the worker's.
    """
    worker = folder / "worker"
    worker.mkdir()
    (worker / "backend").symlink_to(PROJECT_ROOT / "backend")
    return worker
