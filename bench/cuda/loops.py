"""The policy's loops on a machine without numba: there they run as plain Python, about a hundred
times as slowly, so that everything but the time of planning can be measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


def allow_without_numba() -> str:
    """Return how the loops run: ``compiled``, or ``plain Python`` with the reason. Call this before
    ``policy`` is imported.
    """
    try:
        import numba  # noqa: F401
    except ImportError as error:
        sys.modules["numba"] = _stand_in()
        return f"plain Python: {error}"
    return "compiled"


def _stand_in() -> ModuleType:
    """Return a module with what ``policy.loops.compiling`` takes from numba."""

    def njit(**_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: function

    module = ModuleType("numba")
    attributes = {
        "njit": njit,
        "config": SimpleNamespace(DISABLE_JIT=True, CACHE_DIR=""),
        "types": MagicMock(),
    }
    vars(module).update(attributes)
    return module
