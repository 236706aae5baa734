"""Where all processes of a service write when the terminal is for the user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO

from backend import cache
from backend.triton_adapter.launcher.settings import LaunchError, Settings

OUR_ERROR = re.compile(r' (ERROR|CRITICAL) (backend\.|__main__:)|"level": "(error|critical)"')
HARMLESS = re.compile(r"[IW]\d{4} |[+|]|\s*$")
"""Triton's information and warnings, its tables, empty lines."""


def log_path(settings: Settings) -> Path:
    """Return the file of a service: one for each HTTP port."""
    return cache.root() / "logs" / f"serve-{settings.http_port}.log"


def open_log(path: Path) -> IO[bytes]:
    """Begin the file anew; the one before is kept beside it. Raises LaunchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_suffix(".before.log"))
        return path.open("ab", buffering=0)
    except OSError as error:
        text = f"the log {path} cannot be written: {error.strerror}. --verbose prints it instead"
        raise LaunchError(text) from error


def reasons(path: Path) -> list[str]:
    """Return the lines that probably say why a service did not start.

    They are our own errors; where there is none, the last lines that are not harmless.
    """
    lines = path.read_text("utf-8", errors="replace").splitlines()
    ours = [line for line in lines if OUR_ERROR.search(line)]
    return ours[-5:] or [line for line in lines if not HARMLESS.match(line)][-12:]
