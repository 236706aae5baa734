"""The set-up that every stub process needs first (its log, private memory, and an end with its
parent), and what stubs agree on without talking to each other: where the socket and the
configuration are, and which Python runs the engine.

``SPINDLE_SOCKET``, ``SPINDLE_CONFIG`` and ``SPINDLE_PYTHON`` (set by the launcher, or by an
operator of a plain tritonserver) come first.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from backend import lifeline
from backend.config import LogConfig, load_config
from backend.log_format import set_up_logging


def set_up_stub(args: dict[str, str]) -> None:
    """Have this stub end with tritonserver, keep its texts from other users, and send its log
    lines to the server's log, as ``serving.json`` says. Raises ConfigError, OSError.
    """
    lifeline.watch_parent()
    lifeline.close_memory()
    path = config_path(args)
    log = load_config(path, plans=False).log if path.exists() else LogConfig()
    set_up_logging(args["model_name"], log)


def socket_path(args: dict[str, str]) -> Path:
    """Return the engine's socket: the same for all models of a repository. ``args`` are those of
    ``initialize``.

    Raises PermissionError when the folder for it belongs to someone else.
    """
    if path := os.environ.get("SPINDLE_SOCKET"):
        return Path(path)
    folder = Path(tempfile.gettempdir()) / f"spindle-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must belong to user {os.getuid()} and be closed to others, it has mode "
            f"{status.st_mode & 0o777:o}"
        )
    repository = Path(args["model_repository"]).resolve().parent
    return folder / f"{hashlib.sha256(os.fsencode(repository)).hexdigest()[:16]}.sock"


def config_path(args: dict[str, str]) -> Path:
    """Return the serving configuration: by default ``serving.json`` in the version folder of the
    model ``spindle``.
    """
    default = (
        Path(args["model_repository"]).parent / "spindle" / args["model_version"] / "serving.json"
    )
    return Path(os.environ.get("SPINDLE_CONFIG") or default).resolve()


def engine_python() -> str:
    """Return the interpreter for the engine process. ``sys.executable`` is no guide inside a stub,
    its prefix is.
    """
    return os.environ.get("SPINDLE_PYTHON") or str(Path(sys.prefix) / "bin" / "python3")
