"""Keeps the service running: notices what died or hangs, clears it away and starts again, until it
is pointless or stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from backend.launcher.server import TritonServer
from backend.launcher.settings import LaunchError

WATCH_PERIOD_S = 0.5
START_LIMIT_S = 600.0
REPORT_PERIOD_S = 15.0
"""Seconds between two lines about a start that goes on."""
STABLE_S = 60.0
"""A service that ran this long has not failed quickly."""
QUICK_FAILURES = 5
FIRST_BACKOFF_S = 0.5


def supervise(
    server: TritonServer,
    stop: threading.Event,
    on_ready: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    """Run the service until ``stop`` is set; ``on_ready`` gets each start's time in seconds.

    Raises LaunchError when it does not start, or fails ``QUICK_FAILURES`` times in a row.
    """
    failures, was_ready = 0, False
    while not stop.is_set():
        ready_s, trouble = _run_once(server, stop, on_ready, say)
        if trouble is None:
            break
        server.kill()
        was_ready = was_ready or ready_s is not None
        if not was_ready:
            raise LaunchError(f"{trouble} before it was ready")
        failures = 1 if ready_s is not None and monotonic() - ready_s >= STABLE_S else failures + 1
        if failures >= QUICK_FAILURES:
            raise LaunchError(
                f"{trouble}; that was failure {failures} in quick succession: giving up"
            )
        backoff_s = FIRST_BACKOFF_S * 2 ** (failures - 1)
        say(f"{trouble}: starting again in {backoff_s:g} s")
        stop.wait(backoff_s)
    say("stopping: running requests may finish; a second signal ends them at once")
    server.stop()


def _run_once(
    server: TritonServer,
    stop: threading.Event,
    on_ready: Callable[[float], None],
    say: Callable[[str], None],
) -> tuple[float | None, str | None]:
    """Start the service and watch it; return when it became ready (seconds) and its trouble, None
    when asked to stop.
    """
    server.start()
    started_s, ready_s = monotonic(), None
    report_s = started_s + REPORT_PERIOD_S
    while not stop.wait(WATCH_PERIOD_S if ready_s is not None else 0.1):
        if (trouble := server.trouble()) is not None:
            return ready_s, trouble
        if ready_s is None and server.is_ready():
            ready_s = monotonic()
            on_ready(ready_s - started_s)
        if ready_s is not None:
            continue
        passed_s = monotonic() - started_s
        if passed_s > START_LIMIT_S:
            limit = f"the service was not ready after {START_LIMIT_S:.0f} s"
            return None, f"{limit} ({server.waits_for()})"
        if monotonic() >= report_s:
            report_s += REPORT_PERIOD_S
            say(f"still starting after {passed_s:.0f} s: {server.waits_for()}")
    return ready_s, None
