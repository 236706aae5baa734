"""Answers of the kind ``head`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines import latency_cases as cases
from backend.engines.head import folder as folders
from backend.engines.latency_cases import Case
from backend.engines.port import Engine, Footprint
from backend.machine import machine
from backend.storage.manifest import check_model, layer_count, weights_sha256

if TYPE_CHECKING:
    from backend.engines.head.engine import Head
    from backend.engines.registry import Service
    from backend.sampling.distributions import Floats

logger = logging.getLogger(__name__)

__all__ = [
    "RUNS_IN_TARGET",
    "check_folder",
    "convert",
    "footprint",
    "latency_cases",
    "make",
    "taps",
]

RUNS_IN_TARGET = True


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder without a head, or one that reads a layer that its target
    lacks.
    """
    check_model(key, engine, config, path)
    folder, target = path(engine), path(config.target)
    layers = layer_count(target) if (target / "config.json").is_file() else 0
    if layers and (last := taps(folder)[-1]) > layers:
        raise ConfigError(
            f"{key}: {folder} reads layer {last} of its target {target}, which has {layers}"
        )


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load a head. Raises ConfigError for one that was made for another target."""
    from backend.engines.models.reading import bring_embeddings, read_spec

    folder, target = service.path(engine), service.path(service.config.target)
    config, whole = folders.read_config(folder), read_spec(target)
    for name, value, expected in (
        ("hidden_size", config.hidden_size, whole.hidden_size),
        ("vocab_size", config.vocab_size, whole.vocab_size),
    ):
        if value != expected:
            raise ConfigError(f"draft {folder}: {name} is {value}, its target's {expected}")
    trained_on, weights = folders.read_target_sha256(folder), weights_sha256(target)
    if trained_on not in ("", weights):
        raise ConfigError(
            f"draft {folder} was trained on the weights {trained_on[:12]}, its target {target} has "
            f"{weights[:12]}: train a head for it, or, if the target was tuned from these weights, "
            "remove target_sha256 from the head's config.json"
        )
    logger.info("%s: a head of %d rows, %s", engine.name, config.rows, engine.dtype)
    most = service.sizes["max_draft_tokens"]
    if service.config.target.lookahead:
        from backend.engines.head.in_target import HeadInTarget
        from backend.engines.head.network import load

        network, token_ids = load(folder, engine.dtype, engine.device)
        return HeadInTarget(engine.name, network, token_ids, max_draft_tokens=most)
    from backend.engines.head.engine import HeadEngine

    _, tensors, ids = folders.read_head(folder)
    embedding, lm_head = bring_embeddings(target)
    head = _make_head(engine, folder, tensors, lm_head[ids], service.threads)
    return HeadEngine(engine.name, config, head, ids, embedding, lm_head, max_draft_tokens=most)


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


def convert(
    engine: EngineConfig, folder: Path, service: Service, say: Callable[[str], None]
) -> None:
    """Widen the target's embedding if it is quantised, unless the cache has it."""
    del engine, folder
    if not service.config.target.lookahead:
        from backend.engines.models.reading import bring_embeddings

        bring_embeddings(service.path(service.config.target), say)


def _make_head(
    engine: EngineConfig,
    folder: Path,
    weights: dict[str, Floats],  # by name, [...] as HeadConfig.shapes says
    rows: Floats,  # [static tokens, hidden]
    threads: int,
) -> Head:
    """Return a head where it runs: on CPUs on OpenVINO, which a GPU's machine may lack, else on
    torch.
    """
    if engine.dtype == "int8" or (engine.device == "cpu" and engine.kind.runs_int8):
        from backend.engines.head.openvino import OpenvinoHead

        return OpenvinoHead(
            folders.read_config(folder),
            weights,
            rows,
            dtype=engine.dtype,
            narrow=engine.dtype != "fp32" and machine.multiplies_bf16(),
            threads=threads,
        )
    import torch

    from backend.engines.head.network import TorchHead, load

    torch.set_num_threads(threads)
    return TorchHead(load(folder, engine.dtype, engine.device)[0], rows)
