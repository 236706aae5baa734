"""The launcher's own lines."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard output. One that cannot be written (the disk is full) is
    lost: no reason to end a service.
    """
    with contextlib.suppress(OSError):
        print(f"spindle: {text}", file=stream or sys.stdout, flush=True)


def give_up_unwritten() -> None:
    """Drop what standard output and error could not write: the interpreter would try again at its
    end and exit with status 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203 (two streams)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
