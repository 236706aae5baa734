"""The folder that a running service lives in: Triton's home, the rendered model repository and the
engine's socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend import PROJECT_ROOT
from backend.config import ServingConfig
from backend.launcher.environment import RUN_PREFIX, LaunchError
from backend.machine import Machine, machine
from backend.triton_adapter.fields import MODELS
from backend.triton_adapter.rendering import render_config

MOST_SOCKET_PATH_BYTES = 107
"""Linux's limit, less the byte that ends it."""


@contextmanager
def run_folder(machine: Machine = machine) -> Iterator[Path]:
    """Give a new folder and delete it at the end, together with the shared memory whose names begin
    with its name.

    A killed launcher cannot do that, so what such ones have left goes first: their folders are no
    longer locked.
    """
    temporary, shared_memory = machine.temporary_folder(), machine.shared_memory_folder()
    for folder in temporary.glob(f"{RUN_PREFIX}*"):
        if (lock := _lock(folder)) is not None:
            _delete(folder, shared_memory)
            os.close(lock)
    lock = None
    # another launcher that starts now may take an unlocked folder for a leftover
    while lock is None or not folder.exists():
        folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=temporary))
        lock = _lock(folder)
    try:
        yield folder
    finally:
        _delete(folder, shared_memory)
        os.close(lock)


def socket_in(folder: Path) -> Path:
    """Return where the engine listens, in a run folder. Raises LaunchError for too long a path."""
    path = folder / "engine.sock"
    if (excess := len(os.fsencode(path)) - MOST_SOCKET_PATH_BYTES) > 0:
        text = f"TMPDIR {folder.parent} is {excess} bytes too long for the path of a Unix socket"
        raise LaunchError(f"{text}. Choose a shorter one")
    return path


def _lock(folder: Path) -> int | None:
    """Return an open handle that locks the folder until this process ends; None when another
    process has locked it, or it is another user's.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_uid == os.geteuid():
            return handle
    os.close(handle)
    return None


def _delete(folder: Path, shared_memory: Path) -> None:
    for region in shared_memory.glob(f"{glob.escape(folder.name)}_*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_backend(folder: Path) -> Path:
    """Put Triton's Python backend with the stub for this Python together; return the backend
    directory.

    Files are copied: Triton refuses a symbolic link to a backend's library.
    """
    triton = packaged_triton()
    python_backend = folder / "backends" / "python"
    python_backend.mkdir(parents=True)
    stub = packaged_stub()
    library = triton / "backends" / "python"
    for source in (
        library / "libtriton_python.so",
        library / "triton_python_backend_utils.py",
        stub,
    ):
        shutil.copy2(source, python_backend / source.name)
    return python_backend.parent


def write_model_repository(folder: Path, config: ServingConfig) -> Path:
    """Render the model repository for a configuration; return its path."""
    repository = folder / "model_repository"
    for model in MODELS:
        version = repository / model.name / "1"
        version.mkdir(parents=True)
        shutil.copy2(PROJECT_ROOT / "model_repository" / model.name / "1" / "model.py", version)
        text = render_config(
            model,
            decoupled=config.triton.decoupled_mode,
            max_batch_size=config.triton.max_batch_size,
        )
        (version.parent / "config.pbtxt").write_text(text, "utf-8")
    return repository


def packaged_triton() -> Path:
    """Return the folder of the tritonserver inside nvidia-pytriton (found, not imported)."""
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None and spec.submodule_search_locations  # checked at start  # noqa: PT018
    return Path(spec.submodule_search_locations[0]) / "tritonserver"


def packaged_stub() -> Path:
    """Return Triton's stub process for this version of Python."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return packaged_triton() / "python_backend_stubs" / version / "triton_python_backend_stub"


def packaged_libraries() -> Path:
    """Return the folder of the libraries that tritonserver was packaged with."""
    return packaged_triton().parent.parent / "nvidia_pytriton.libs"
