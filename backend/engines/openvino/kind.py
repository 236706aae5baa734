"""Answers of the kind ``openvino`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.models import kind
from backend.engines.models.kind import check_any_decoder, latency_cases
from backend.engines.models.reading import read_spec
from backend.engines.openvino.formats import HEAD_BYTES, misfit_of_four_bits, price_of_four_bits
from backend.engines.port import Engine, Footprint
from backend.machine import machine
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import weight_files

if TYPE_CHECKING:
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = [
    "check_folder",
    "convert",
    "footprint",
    "latency_cases",
    "make",
    "misfit_of_four_bits",
    "price_of_four_bits",
]

WEIGHT_BYTES = {"fp32": (4, 8, 8), "bf16": (4, 6, 6), "int8": (4, 2, 6)}
"""By dtype, of a weight that is looked up, of one that is multiplied, and of one in an expert: as
read, and as packed.
"""


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder that is not a decoder we serve, with the reason."""
    check_any_decoder(key, engine, config, path)
    reason = misfit_of_four_bits(read_model_config(path(engine)))
    if engine.dtype == "int4" and reason:
        raise ConfigError(f"{key} {path(engine)} is not served in int4: {reason}")


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    from backend.engines.openvino.engine import OpenvinoEngine

    target = engine.name == service.config.target.name
    logger.info("%s: %s on %s", engine.name, engine.dtype, machine.processor())
    if engine.dtype == "int4":
        config = read_model_config(service.path(engine))
        logger.info("%s: %s", engine.name, price_of_four_bits(config))
    new_engine = OpenvinoEngine.load(
        engine.name,
        service.path(engine),
        dtype=engine.dtype,
        threads=service.threads,
        invariant=engine.invariant,
        verifies=target,
        taps=service.taps if target else (),
        lm_head=head_dtype(engine),
        **service.sizes,
    )
    if target and engine.invariant and not new_engine.limits.invariant:
        logger.warning("%s: in %s outputs may differ with load", engine.name, engine.dtype)
    return new_engine


def convert(
    engine: EngineConfig, folder: Path, service: Service, say: Callable[[str], None]
) -> None:
    """Convert a folder, unless the cache has its graph and its description."""
    from backend.engines.openvino.graph_cache import bring_graph  # it imports OpenVINO

    read_spec(folder)
    taps = service.taps if engine.name == service.config.target.name else ()
    bring_graph(folder, engine.dtype, taps, say, head_dtype(engine))


def head_dtype(engine: EngineConfig) -> str:
    """Return what the head is rounded to; nothing where it stays."""
    return "" if engine.lm_head == "folder" else engine.lm_head


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    from backend.engines.openvino.layout import SCRATCH_TOKENS

    is_packed = engine.dtype == "int4"
    plan = kind.footprint(
        engine,
        config,
        folder,
        weight_sizes=WEIGHT_BYTES["int8" if is_packed else engine.dtype],
        packs_head=True,
        scratch_tokens=SCRATCH_TOKENS,
    )
    if is_packed:
        spec = read_spec(folder)
        stored = sum(file.stat().st_size for file in weight_files(folder))
        head = int(HEAD_BYTES[engine.lm_head] * spec.vocab_size * spec.hidden_size)
        plan = replace(plan, weights=stored + head)
    return plan
