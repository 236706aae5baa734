"""The place of the tritonserver of the package nvidia-pytriton."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


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
