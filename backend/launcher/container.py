"""``python -m backend.launcher.container ARGUMENTS``: serve with a container's own
tritonserver, which gets the arguments, and with the OpenAI front end.

It ends after three failed probes in a row, so that the container is restarted: Triton does not
notice a stub process that has died. ``TRITONSERVER`` names the program, ``FRONT_END_PYTHON`` the
front end's interpreter (empty: no front end), ``START_LIMIT_S`` and ``PROBE_PERIOD_S`` the times;
``*_PORT``, ``BIND`` and ``SPINDLE_CONFIG`` are as the launcher has them.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from time import monotonic

from backend import PROJECT_ROOT, lifeline
from backend.config import load_config
from backend.launcher.environment import LaunchSettings, read_settings
from backend.launcher.output import say
from backend.launcher.processes import DynamoWorker, FrontEndProcess, end
from backend.launcher.server import StopSignal, drain, flags
from backend.triton_adapter.admin_secret import ensure_secret

FAILED_PROBES = 3
"""Failed probes in a row after which the service is ended."""
STOP_LIMIT_S = 20.0
"""Longest time for tritonserver to end once its requests have ended, in seconds."""


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal, tritonserver's end or failed probes; returns the exit status."""
    settings = read_settings(os.environ)
    ensure_secret()
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.take_signal)
    worker = None
    if settings.dynamo_namespace:
        worker = DynamoWorker(settings, load_config(settings.config, plans=False), PROJECT_ROOT)
    server = lifeline.start(sys.executable, _command(settings, arguments), cwd=PROJECT_ROOT)
    python = os.environ.get("FRONT_END_PYTHON")
    front_end = FrontEndProcess(settings, python=python) if python else None
    if front_end is not None:
        front_end.start()
    if worker is not None:
        worker.start()
    is_ill = _watch(server, stop)
    if front_end is not None:
        front_end.refuse()
    if worker is not None:
        worker.leave()
    drain(settings, stop.at_once)
    status = end(server, STOP_LIMIT_S)
    if front_end is not None:
        front_end.stop()
    if worker is not None:
        worker.stop()
    return 1 if is_ill else status


def _command(settings: LaunchSettings, arguments: Sequence[str]) -> list[str]:
    return [
        os.environ.get("TRITONSERVER") or "tritonserver",
        f"--model-repository={PROJECT_ROOT / 'model_repository'}",
        "--disable-auto-complete-config",
        *flags(settings, secrets.token_urlsafe()),
        *arguments,
    ]


def _watch(server: subprocess.Popen[bytes], stop: threading.Event) -> bool:
    """Return whether the service is ill; it is not when tritonserver ends or ``stop`` is set."""
    start_limit_s = float(os.environ.get("START_LIMIT_S") or 900)
    period_s = float(os.environ.get("PROBE_PERIOD_S") or 15)
    probe = [sys.executable, str(PROJECT_ROOT / "docker" / "healthcheck.py")]
    started_s, has_served, failures = monotonic(), False, 0
    while not stop.wait(period_s) and server.poll() is None:
        if subprocess.run(probe, check=False).returncode == 0:
            has_served, failures = True, 0
        elif has_served or monotonic() - started_s >= start_limit_s:
            failures += 1
        if failures >= FAILED_PROBES and not stop.is_set():
            say(f"{failures} probes in a row have failed: ending")
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
