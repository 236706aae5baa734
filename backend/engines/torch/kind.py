"""Answers of the kind ``torch`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.config import EngineConfig
from backend.engines.port import Engine
from backend.engines.stepping.kind import check_any_decoder as check_folder
from backend.engines.stepping.kind import footprint, latency_cases

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.torch import engine as torch

    return torch.make(engine, service)
