"""Answers of the kind ``torch`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from backend.engine_config import EngineConfig
from backend.engines.models.kind import check_any_decoder as check_folder
from backend.engines.models.kind import footprint, latency_cases
from backend.engines.port import Engine
from backend.machine import machine

if TYPE_CHECKING:
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = ["check_folder", "footprint", "latency_cases", "make"]


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    import torch

    from backend.engines.torch.engine import TorchEngine

    on_cpu = engine.device == "cpu"
    where = machine.processor() if on_cpu else engine.device
    logger.info("%s: %s on %s", engine.name, engine.dtype, where)
    if engine.dtype == "bf16" and on_cpu and not machine.multiplies_bf16():
        logger.warning(
            "%s: dtype 'bf16' is slow on a processor without products in bf16; 'auto' is what is "
            "fast here",
            engine.name,
        )
    torch.set_num_threads(service.threads)
    return TorchEngine.load(
        engine.name,
        service.path(engine),
        dtype=engine.dtype,
        device=engine.device,
        taps=service.taps if engine.name == service.config.target.name else (),
        **service.sizes,
    )
