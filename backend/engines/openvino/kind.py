"""What the kind ``openvino`` answers before an engine of it is made (``KindModule``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.port import Engine, Footprint
from backend.engines.stepping import kind
from backend.engines.stepping.kind import check_folder, latency_cases

if TYPE_CHECKING:
    from backend.engines.registry import Service

__all__ = ["check_folder", "footprint", "latency_cases", "make"]

SCRATCH_TOKENS = 128 * 32
"""KV besides the ledger's: copies of prompts' last blocks and of branches."""

WEIGHT_BYTES = {"fp32": (4, 8), "bf16": (4, 6), "int8": (4, 2)}
"""By dtype, of a weight that is looked up and of one that is multiplied: as read, and as packed."""


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.openvino import engine as openvino

    return openvino.make(engine, service)


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    return kind.footprint(
        engine,
        config,
        folder,
        weight_sizes=WEIGHT_BYTES[engine.dtype],
        packs_head=True,
        scratch_tokens=SCRATCH_TOKENS,
    )
