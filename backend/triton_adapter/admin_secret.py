"""The secret that administrative commands need.

Web pages can send requests to ports of the machine that they are read on, and so can neighbours; a
secret of the run keeps both from commanding the server.
"""

from __future__ import annotations

import hmac
import os
import secrets

from backend.request import ErrorCode, RequestError

VARIABLE = "SPINDLE_ADMIN_SECRET"
"""Environment variable of the secret. The launcher draws one if it is not set."""
_OPEN_COMMANDS = ("health",)
"""Commands that need no secret: probes have none."""


def ensure_secret() -> None:
    """Draw a secret for this process and its children unless the environment has one."""
    os.environ[VARIABLE] = os.environ.get(VARIABLE) or secrets.token_urlsafe(24)


def check_secret(command: str, candidate: str) -> None:
    """Raise RequestError if a command needs the secret and ``given`` is another text."""
    if command.strip() in _OPEN_COMMANDS:
        return
    secret = os.environ.get(VARIABLE)
    if not secret:
        reason = f"administrative commands are off: set {VARIABLE} before tritonserver starts"
    elif not candidate:
        reason = f"command {command!r} needs the secret of this run ({VARIABLE}) in the input "
        reason += "'secret'; `spindle admin` sends it"
    elif hmac.compare_digest(candidate.encode(), secret.encode()):
        return
    else:
        reason = f"secret is not the one of this run ({VARIABLE})"
    raise RequestError(ErrorCode.INVALID_ARGUMENT, reason)
