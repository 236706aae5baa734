"""A GGUF file as the model of ``spindle serve``: converted to a folder in the cache, once."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

from backend import lifeline
from backend.launcher.settings import LaunchError
from backend.storage import cache
from backend.triton_adapter.paths import PROJECT_ROOT


def folder_of(model: str, stop: threading.Event) -> str:
    """Return the folder of a GGUF file, which is converted unless the cache has it; any other
    ``model`` as it is. Raises LaunchError.
    """
    file = Path(model).expanduser().resolve()
    if file.suffix != ".gguf" or not file.is_file():
        return model
    status = file.stat()
    key = hashlib.sha256(f"{file} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache.model_folder(f"{file.stem}-{key}")
    if not folder.is_dir():
        module = [sys.executable, "-m", "engines_build.convert"]
        process = lifeline.start(
            sys.executable, [*module, "--gguf", str(file), "--out", str(folder)], cwd=PROJECT_ROOT
        )
        while process.poll() is None:
            if stop.wait(0.1):
                process.terminate()
                process.wait()
        if process.returncode != 0 and not stop.is_set():
            raise LaunchError(f"{file} was not converted: the lines above say why")
    return str(folder)
