"""The one place that knows which TensorRT there is: ``tensorrt_rtx`` (compiles without a GPU) or
``tensorrt`` (10.14 and 11).
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from backend.engines.trt_graph import LIBRARIES


class TrtError(Exception):
    """TensorRT is missing or refused something; the message says what it said."""


def find_library(name: str | None = None) -> ModuleType:
    """Return ``tensorrt_rtx`` or ``tensorrt``, by name or the first that is installed. Raises
    TrtError.
    """
    if name is not None and name not in LIBRARIES:
        raise TrtError(f"library must be one of {', '.join(LIBRARIES)}, got {name!r}")
    for candidate in [name] if name else LIBRARIES:
        if importlib.util.find_spec(candidate):
            try:
                return importlib.import_module(candidate)
            except (ImportError, OSError) as error:
                raise TrtError(f"{candidate} cannot be imported: {error}") from error
    raise TrtError(
        f"{name or ' or '.join(LIBRARIES)} is not installed; TensorRT-RTX comes with: pip "
        f"install tensorrt-rtx-cu13"
    )


def has_attention(library: ModuleType) -> bool:
    """Return whether there is a layer for attention (TensorRT 11, TensorRT-RTX 1.7) rather than
    matrix products only.
    """
    return hasattr(library.INetworkDefinition, "add_attention_v2")


class Messages:
    """A TensorRT logger that keeps what went wrong, for the message of an error."""

    def __init__(self, library: ModuleType) -> None:
        severity = library.ILogger.Severity
        lines: list[str] = []

        class Logger(library.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                library.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                no_gpu = (
                    "catchCudaError" in message and "cudaError 35" in message
                )  # said by the way, where there is none
                if level in {severity.INTERNAL_ERROR, severity.ERROR} and not no_gpu:
                    lines.append(message)

        self.logger: Any = Logger()
        self._lines = lines

    def error(self, what: str) -> TrtError:
        """Return an error that says ``what`` failed and the library's own words."""
        return TrtError(f"{what}: {'; '.join(self._lines[-3:]) or 'TensorRT gave no reason'}")
