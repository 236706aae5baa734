"""Answers of the kind ``trt_graph`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.models.kind import footprint, latency_cases
from backend.engines.port import Engine

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.trt_graph.runtime import open_engine

    device = "cuda" if engine.device == "cpu" else engine.device
    return open_engine(engine.name, service.path(engine), device, **service.sizes)


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Check nothing yet: the runtime compares the folder's manifest when it loads it."""
