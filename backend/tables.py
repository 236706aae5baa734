"""Which measured latency table belongs to a deployment: its file is named by a hash of everything that its times depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend import cache, machine
from backend.config import EngineConfig, ServingConfig
from backend.manifest import read_manifest


def timed_engines(config: ServingConfig) -> list[EngineConfig]:
    """Return the engines whose passes are measured, the target first: those that run a model."""
    return [engine for engine in (config.target, *config.drafts) if engine.engine == "torch"]


def table_file(config: ServingConfig, folders: Mapping[str, Path]) -> Path:
    """Return where the table of a deployment lives; ``folders`` are its timed engines' checkpoints by engine name.

    Raises ConfigError when a folder is no checkpoint.
    """
    key = json.dumps(subject(config, folders), sort_keys=True)
    return cache.table_file(hashlib.sha256(key.encode()).hexdigest()[:32])


def subject(config: ServingConfig, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return what the times depend on, JSON-able: processor, cores, torch, the threads setting, and the engines' shapes and dtypes."""
    return {
        "processor": machine.processor(),
        "cores": machine.cores(),
        "torch": machine.versions().get("torch"),
        "threads": config.threads,
        "engines": [
            {
                "name": engine.name,
                "dtype": engine.dtype,
                "device": engine.device,
                "layout_sha256": read_manifest(folders[engine.name]).layout_sha256,
            }
            for engine in timed_engines(config)
        ],
    }
