"""A request that shows speculation at work, and what the running service makes of it."""

from __future__ import annotations

import json
import shlex
import urllib.request
from typing import Any

from backend.launcher.settings import Settings
from backend.loopback import open_url

REQUEST: dict[str, Any] = {
    "text_input": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    "max_tokens": 32,
    "temperature": 0,
    "exclude_input_in_output": True,
    "return_num_output_tokens": True,
    "return_perf_metrics": True,
}
LIMIT_S = 60.0


def command(settings: Settings) -> str:
    """Return the command line that sends the request; curl would send it to a proxy, too."""
    direct = " --noproxy '*'" if urllib.request.getproxies().keys() & {"http", "all"} else ""
    return f"curl -s{direct} {shlex.quote(_url(settings))} -d '{json.dumps(REQUEST)}'"


def results(settings: Settings) -> list[str]:
    """Send the request and return what came of it, in lines; none where that fails."""
    body, headers = json.dumps(REQUEST).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(_url(settings), body, headers)
    try:
        with open_url(request, LIMIT_S) as response:
            return summary(json.load(response))
    except (OSError, ValueError):
        return []


def summary(reply: dict[str, Any]) -> list[str]:
    """Return a reply in lines: its text, and how many steps speculation saved.

    Every step adds one token to those it accepts.
    """
    written, proposed = int(reply["num_output_tokens"]), int(reply["total_draft_tokens"])
    accepted = int(reply["total_accepted_draft_tokens"])
    lines = [f"its answer: {json.dumps(reply['text_output'], ensure_ascii=False)}"]
    if proposed:
        steps = written - accepted
        saved = f"{steps} steps instead of {written}"
        lines += [f"{accepted} of {proposed} proposed tokens were accepted: {saved}"]
    return lines


def _url(settings: Settings) -> str:
    return f"http://{settings.at(settings.http_port)}/v2/models/ensemble/generate"
