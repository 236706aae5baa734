"""A GGUF file as the model of ``spindle serve``: converted to a folder in the cache, once."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

from backend.launcher.processes import run
from backend.launcher.settings import LaunchError
from backend.storage import cache


def folder_of(model: str, stop: threading.Event) -> str:
    """Return the folder of a GGUF file, which is converted unless the cache has it; any other
    ``model`` as it is. Raises LaunchError.
    """
    file = Path(model).expanduser().absolute()
    if file.suffix != ".gguf" or not file.is_file():
        return model
    facts = file.stat()
    key = hashlib.sha256(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache.model_folder(f"{file.stem}-{key}")
    if not folder.is_dir():
        module = [sys.executable, "-m", "engines_build.convert"]
        status = run([*module, "--gguf", str(file), "--out", str(folder)], stop)
        if status != 0 and not stop.is_set():
            raise LaunchError(f"{file} was not converted: the lines above say why")
    return str(folder)
