"""Processes: children and their ends, and the tree as /proc has it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep

from backend import PROJECT_ROOT, lifeline

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
    left = list(pids)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline_s = monotonic() + limit_s
    while (left := [pid for pid in left if is_running(pid)]) and monotonic() < deadline_s:
        sleep(0.05)
    return left


def _running_parent(pid: int) -> int | None:
    """Return the parent of a process that runs, None when it has ended (a zombie has)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before it may hold anything
    return None if state in "ZX" else int(parent)
