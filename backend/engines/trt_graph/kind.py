"""Answers of the kind ``trt_graph`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.port import Engine
from backend.engines.stepping.kind import footprint, latency_cases

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.trt_graph import runtime

    return runtime.make(engine, service)


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Check nothing yet: the runtime compares the folder's manifest when it loads it."""
