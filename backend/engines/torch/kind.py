"""What the kind ``torch`` answers before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.port import Engine
from backend.engines.stepping.kind import footprint, latency_cases
from backend.kinds import misfit_of_llama
from backend.storage.manifest import check_model, read_model_config

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.torch import engine as torch

    return torch.make(engine, service)


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder that is not a decoder we serve, with the reason."""
    check_model(key, engine, config, path)
    folder = path(engine)
    if misfit_of_llama(read_model_config(folder)):
        from backend.engines.models.shape import check_decoder  # it imports torch

        check_decoder(key, folder)
