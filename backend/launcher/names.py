"""The names by which clients call the model."""

from __future__ import annotations

import re
from pathlib import Path

from backend.config import ServingConfig
from backend.launcher.settings import Settings


def model_names(settings: Settings, config: ServingConfig) -> tuple[str, ...]:
    """Return those that are set, else that of the model's folder, or of a user's own engine."""
    engine = config.target.engine.rpartition(".")[2]
    return settings.model_names or (name_of(config.target.model) or engine,)


def name_of(model: str) -> str:
    """Return the name of a model's folder; ``ORG/NAME`` of a snapshot in a hub's cache, where the
    folder is called by its commit.
    """
    hub = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", model)
    return hub[1].replace("--", "/", 1) if hub else Path(model).name
