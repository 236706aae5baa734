"""Answers that all kinds of step engines share before an engine is made (``KindModule``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.latency_cases import latency_cases
from backend.engines.models.reading import read_spec
from backend.engines.port import Footprint
from backend.storage.manifest import check_model as check_folder
from backend.storage.manifest import naming

__all__ = ["check_any_decoder", "check_folder", "footprint", "latency_cases"]


def check_any_decoder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder that is not a decoder we serve, with the reason."""
    check_folder(key, engine, config, path)
    with naming(key):
        read_spec(path(engine))


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path, **sizes: Any) -> Footprint:
    """Return what a step engine takes of memory (``models.footprint``)."""
    from backend.engines.models import footprint as planning  # it imports NumPy

    return planning.footprint(engine, config, folder, **sizes)
