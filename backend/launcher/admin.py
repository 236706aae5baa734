"""``spindle admin COMMAND``: give a server on this machine an administrative command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import urllib.error
import urllib.request

from backend.launcher.environment import LaunchError, read_settings
from backend.launcher.processes import environment_of, listening_process
from backend.loopback import open_url
from backend.triton_adapter.admin_secret import VARIABLE

ANSWER_LIMIT_S = 120.0
"""``reload drafts`` loads models."""
EXAMPLES = """commands:
  spindle admin health                      report what the engine is doing
  spindle admin set speculation=off         turn speculation off; also shadow, canary_share, ...
  spindle admin switches                    print the switches
  spindle admin explain                     explain the plan of each request in the last step
  spindle admin learned                     print what the policy has learned
  spindle admin reload drafts               load the drafts that serving.json names now
"""


def main() -> int:
    """Send the command and print the reply; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="spindle admin",
        description="Send an administrative command to a server on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="+", metavar="WORD")
    parser.add_argument("--port", help="Triton's HTTP port (env HTTP_PORT; default: 8000)")
    options = parser.parse_args()
    if options.port:
        os.environ["HTTP_PORT"] = options.port
    try:
        settings = read_settings(os.environ)
        url = f"http://{settings.at(settings.http_port)}"
        reply = ask(url, " ".join(options.command), secret_of(settings.http_port))
    except LaunchError as error:
        print(f"spindle: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(reply, indent=1, ensure_ascii=False))
    return 0


def secret_of(port: int) -> str:
    """Return the secret of this environment, else that of the process which listens on a port; ''
    if neither has one.
    """
    return os.environ.get(VARIABLE) or environment_of(listening_process(port)).get(VARIABLE, "")


def ask(url: str, command: str, secret: str) -> object:
    """Return the server's reply. Raises LaunchError with the reason for a refusal."""
    body = json.dumps({"command": command, "secret": secret}).encode()
    request = urllib.request.Request(
        f"{url}/v2/models/spindle/generate", body, {"Content-Type": "application/json"}
    )
    try:
        with open_url(request, ANSWER_LIMIT_S) as response:
            return json.loads(json.load(response)["reply"])
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            raise LaunchError(json.load(error)["error"]) from None
        raise LaunchError(f"{url} is not a Spindle server: it answered {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)  # a URLError's is the error of the socket
        text = f"no answer from {url} ({getattr(reason, 'strerror', None) or reason})"
        raise LaunchError(f"{text}: name the server's HTTP port by --port") from None
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"{url} is not a Spindle server") from None


if __name__ == "__main__":
    sys.exit(main())
