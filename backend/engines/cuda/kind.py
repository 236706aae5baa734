"""Answers of the kind ``cuda`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.models.kind import check_folder, latency_cases
from backend.engines.port import Engine, Footprint

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.cuda import engine as cuda

    return cuda.make(engine, service)


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    from backend.engines.cuda import footprint as planning  # it imports torch

    return planning.footprint(engine, config, folder)
