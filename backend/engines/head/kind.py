"""Answers of the kind ``head`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines import latency_cases as cases
from backend.engines.head import folder as folders
from backend.engines.latency_cases import Case
from backend.engines.port import Engine, Footprint
from backend.storage.manifest import check_model as check_folder

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make", "taps"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load a head. Raises ConfigError for one that was made for another target."""
    from backend.engines.head import engine as head

    return head.make(engine, service)


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what a head takes of memory."""
    sequences, in_target = config.limits.max_active_requests, bool(config.target.lookahead)
    return folders.footprint(folder, engine.dtype, engine.device, sequences, in_target=in_target)


def latency_cases(*, target: bool) -> list[Case]:
    """Return a draft's cases but catching up: a head reads the target instead."""
    return [case for case in cases.latency_cases(target=target) if case.run > 1]


def taps(folder: Path) -> tuple[int, ...]:
    """Return the target's layers, counted from 1, whose output the head reads."""
    return folders.read_config(folder).layers
