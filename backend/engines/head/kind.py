"""Answers of the kind ``head`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
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
    from torch import Tensor

    from backend.engines.head.network import Head, HeadNetwork
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = ["RUNS_IN_TARGET", "check_folder", "footprint", "latency_cases", "make", "taps"]

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
    from backend.engines.checkpoint import load_embeddings
    from backend.engines.head.engine import HeadEngine
    from backend.engines.head.in_target import HeadInTarget
    from backend.engines.head.network import load
    from backend.engines.models.reading import read_spec

    folder, target = service.path(engine), service.path(service.config.target)
    config, whole = folders.read_config(folder), read_spec(target)
    for name, own, theirs in (
        ("hidden_size", config.hidden_size, whole.hidden_size),
        ("vocab_size", config.vocab_size, whole.vocab_size),
    ):
        if own != theirs:
            raise ConfigError(f"draft {folder}: {name} is {own}, its target's {theirs}")
    trained_on, weights = folders.read_target_sha256(folder), weights_sha256(target)
    if trained_on not in ("", weights):
        raise ConfigError(
            f"draft {folder} was trained on the weights {trained_on[:12]}, its target {target} has "
            f"{weights[:12]}: train a head for it, or, if the target was tuned from these weights, "
            "remove target_sha256 from the head's config.json"
        )
    network, token_ids = load(folder, engine.dtype, engine.device)
    logger.info("%s: a head of %d rows, %s", engine.name, len(token_ids), engine.dtype)
    most = service.sizes["max_draft_tokens"]
    if service.config.target.lookahead:
        return HeadInTarget(engine.name, network, token_ids, max_draft_tokens=most)
    return HeadEngine(
        engine.name,
        network,
        token_ids,
        *load_embeddings(target, engine.device),
        max_draft_tokens=most,
        kernels=_kernels(engine, service.threads),
    )


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


def _kernels(engine: EngineConfig, threads: int) -> Callable[[HeadNetwork, Tensor], Head]:
    """Return what runs a head here: int8 is OpenVINO's, which a GPU's machine may lack."""
    if engine.dtype != "int8":
        import torch

        from backend.engines.head.network import TorchHead

        torch.set_num_threads(threads)
        return TorchHead
    from backend.engines.head.openvino import OpenvinoHead

    precision = "bf16" if machine.multiplies_bf16() else "f32"
    return partial(OpenvinoHead, precision=precision, threads=threads)
