"""The launcher's own lines."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard output. One that cannot be written (the disk is full) is lost: no reason to end a service."""
    with contextlib.suppress(OSError):
        print(f"spindle: {text}", file=stream or sys.stdout, flush=True)
