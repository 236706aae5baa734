"""The launcher's own lines, and the log of its processes: a file, unless the terminal shows it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from backend.launcher.environment import LaunchError, LaunchSettings
from backend.storage import cache

MOST_BYTES = 64 * 2**20
SIZE_CHECK_PERIOD_S = 5.0
OUR_ERROR = re.compile(
    r' (ERROR|CRITICAL) (backend\.|__main__:)|"level": "(error|critical)"'
    r"|^\((EngineCore|Worker)\b.*\) ERROR .*\] \w+(Error|Exception): "  # vLLM's processes
)
HARMLESS = re.compile(r"[IW]\d{4} |[+|]|\s*$")
"""Triton's information and warnings, its tables, empty lines."""


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


def log_path(settings: LaunchSettings) -> Path:
    """Return the file of a service: one for each HTTP port."""
    return cache.root() / "logs" / f"serve-{settings.http_port}.log"


@contextmanager
def open_log(
    path: Path, most_bytes: int = MOST_BYTES, check_period_s: float = SIZE_CHECK_PERIOD_S
) -> Iterator[IO[bytes]]:
    """Begin a new file, keep the last one next to it, and keep it small while it is open.

    Raises LaunchError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(_before(path))
        log = path.open("ab", buffering=0)
    except OSError as error:
        text = f"the log {path} cannot be written: {error.strerror}. --verbose prints it instead"
        raise LaunchError(text) from error
    closed = threading.Event()
    limits = (path, closed, most_bytes, check_period_s)
    threading.Thread(target=_keep_small, args=limits, name="log-size", daemon=True).start()
    with log:
        yield log
    closed.set()


def _keep_small(
    path: Path, closed: threading.Event, most_bytes: int, check_period_s: float
) -> None:
    while not closed.wait(check_period_s):
        with contextlib.suppress(OSError):  # a full disk is no reason to end a service
            if path.stat().st_size > most_bytes:
                shutil.copyfile(path, _before(path))
                os.truncate(path, 0)  # writers append, so they go on at the beginning


def _before(path: Path) -> Path:
    return path.with_suffix(".before.log")


def reasons(path: Path) -> list[str]:
    """Return the lines that probably say why a service did not start.

    They are our own errors; where there is none, the last lines that are not harmless.
    """
    lines = path.read_text("utf-8", errors="replace").splitlines()
    errors = [line for line in lines if OUR_ERROR.search(line)]
    return errors[-5:] or [line for line in lines if not HARMLESS.match(line)][-12:]
