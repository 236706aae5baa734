"""What kinds of step engines answer alike before an engine is made (``KindModule``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config import EngineConfig, ServingConfig
from backend.engines.latency_cases import latency_cases
from backend.engines.port import Footprint
from backend.storage.manifest import check_model as check_folder

__all__ = ["check_folder", "footprint", "latency_cases"]


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path, **own: Any) -> Footprint:
    """Return what a step engine takes of memory (``stepping.footprint``)."""
    from backend.engines.stepping import footprint as planning  # it imports torch

    return planning.footprint(engine, config, folder, **own)
