"""How a service ends without breaking off answers: its engine refuses new requests, and
tritonserver gets SIGTERM only when no request is left. After SIGTERM Triton closes the
connections of new clients without an answer, and ends what outlasts its exit timeout likewise.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from http.client import HTTPException
from time import sleep
from typing import Any

from backend.launcher.say import say
from backend.launcher.settings import Settings
from backend.loopback import open_url

ANSWER_LIMIT_S = 5.0
POLL_PERIOD_S = 0.1
LATE_LIMIT_S = 5.0
"""Seconds after the time of a drain in which the engine must have ended what is left."""


class Stop(threading.Event):
    """Set by the first signal to stop; ``at_once`` is set by a second one."""

    def __init__(self) -> None:
        """Wait for signals, which ``signalled`` takes."""
        super().__init__()
        self.at_once = threading.Event()

    def signalled(self, *_: object) -> None:
        """Take a signal."""
        (self.at_once if self.is_set() else self).set()


def drain(settings: Settings, at_once: threading.Event) -> None:
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


def _health(settings: Settings) -> dict[str, Any]:
    """Return what the engine says of itself. Raises OSError where it does not answer."""
    url = f"http://{settings.at(settings.http_port)}/v2/models/spindle/generate"
    request = urllib.request.Request(
        url, b'{"command": "health"}', {"Content-Type": "application/json"}
    )
    with open_url(request, ANSWER_LIMIT_S) as response:
        reply: dict[str, Any] = json.loads(json.load(response)["reply"])
    return reply
