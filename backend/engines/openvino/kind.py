"""Answers of the kind ``openvino`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.models import kind
from backend.engines.models.kind import check_any_decoder as check_folder
from backend.engines.models.kind import latency_cases
from backend.engines.port import Engine, Footprint
from backend.kinds import misfit_of_llama
from backend.machine import machine
from backend.storage.manifest import read_model_config

if TYPE_CHECKING:
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = ["check_folder", "convert", "footprint", "latency_cases", "make"]

WEIGHT_BYTES = {"fp32": (4, 8, 8), "bf16": (4, 6, 6), "int8": (4, 2, 6)}
"""By dtype, of a weight that is looked up, of one that is multiplied, and of one in an expert: as
read, and as packed.
"""


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.openvino.engine import OpenvinoEngine

    target = engine.name == service.config.target.name
    logger.info("%s: %s on %s", engine.name, engine.dtype, machine.processor())
    made = OpenvinoEngine(
        engine.name,
        service.path(engine),
        dtype=engine.dtype,
        threads=service.threads,
        invariant=engine.invariant,
        verifies=target,
        taps=service.taps if target else (),
        **service.sizes,
    )
    if target and engine.invariant and not made.limits.invariant:
        logger.warning("%s: in %s texts may differ with load", engine.name, engine.dtype)
    return made


def convert(
    engine: EngineConfig, folder: Path, service: Service, say: Callable[[str], None]
) -> None:
    """Convert a folder that has no graph of our own, unless the cache has it converted."""
    if misfit_of_llama(read_model_config(folder)):
        from backend.engines.openvino.graph_cache import bring_graph  # it imports OpenVINO

        taps = service.taps if engine.name == service.config.target.name else ()
        bring_graph(folder, engine.dtype, taps, say)


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    from backend.engines.openvino.layout import SCRATCH_TOKENS

    return kind.footprint(
        engine,
        config,
        folder,
        weight_sizes=WEIGHT_BYTES[engine.dtype],
        packs_head=True,
        scratch_tokens=SCRATCH_TOKENS,
    )
