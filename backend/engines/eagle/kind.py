"""Answers of the kind ``eagle`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines import latency_cases as cases
from backend.engines.eagle.folder import (
    EagleShape,
    activations,
    is_ours,
    made_for,
    read_shape,
    served_folder,
)
from backend.engines.eagle.published import files_of, other_kind
from backend.engines.latency_cases import Case
from backend.engines.memory import available_bytes
from backend.engines.port import Engine, Footprint
from backend.machine import machine
from backend.storage import manifest
from backend.storage.weight_files import shapes_in

if TYPE_CHECKING:
    from torch import Tensor

    from backend.engines.eagle.model import RowProducts, RowWeights
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = [
    "check_folder",
    "convert",
    "footprint",
    "latency_cases",
    "make",
    "served_folder",
    "taps",
]

_LOGIT_BYTES = 28
"""Bytes of each logit, while candidates are chosen (``models.footprint``)."""


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load a head. Raises ConfigError for one that does not fit the target."""
    import torch

    from backend.engines.eagle.engine import EagleEngine
    from backend.engines.eagle.folder import load
    from backend.engines.eagle.model import EagleModel
    from backend.engines.weights import DTYPES, load_embeddings

    folder, target = service.path(engine), service.path(service.config.target)
    shape, tensors = load(folder)
    embedding, lm_head = load_embeddings(target, engine.device)
    _check_fits(folder, shape, target, embedding)
    sizes = service.sizes
    torch.set_num_threads(service.threads)
    model = EagleModel(
        shape,
        tensors,
        embedding=embedding,
        lm_head=lm_head,
        positions=sizes["max_context_tokens"] + sizes["max_draft_tokens"],
        dtype=DTYPES[activations(engine)],
        device=engine.device,
        kernels=_kernels(engine, service.threads),
    )
    text = "%s: an EAGLE-3 head of %d tokens on layers %s, %s"
    logger.info(text, engine.name, shape.draft_vocab_size, list(shape.layers), engine.dtype)
    width = engine.tree_width
    return EagleEngine(engine.name, model, **sizes, width=width, count=service.count)


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError beginning with the setting ``key`` for what is no folder, for files that
    are not there or damaged, and for a head that by its ``config.json`` and the names of its
    tensors is of another kind.
    """
    del config
    folder = path(engine)
    manifest.check_folder(key, engine.model, folder, (), tokenizer=False)
    with manifest.naming(key):
        files = [file for file in files_of(folder) if file.suffix == ".safetensors"]
        names = [] if is_ours(folder) else [name for file in files for name in shapes_in(file)]
        if what := other_kind(manifest.read_model_config(folder), names):
            raise ConfigError(f"{folder} cannot be served: it is {what}")


def convert(
    engine: EngineConfig, folder: Path, service: Service, say: Callable[[str], None]
) -> None:
    """Convert a published folder unless the cache has it converted for this target."""
    del engine
    if is_ours(folder):
        return
    from backend.engines.eagle.conversion import bring_head  # it imports torch and transformers

    target = service.config.target
    narrow = target.device != "cpu" or machine.multiplies_bf16()
    dtype = "bf16" if narrow else "fp32"
    free = available_bytes(target)
    path = service.path(target)
    bring_head(folder, path, say, dtype=dtype, device=target.device, free_bytes=free)


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what a head takes of memory: its weights and, where it has none of its own, a copy of
    the target's embedding; the KV of all blocks; a pass's copies of the KV of all its texts.
    """
    from backend.engines.checkpoint import NUMBER_BYTES  # it imports NumPy

    shape, item, limits = read_shape(folder), NUMBER_BYTES[activations(engine)], config.limits
    numbers = sum(map(prod, shape.tensors().values()))
    weights = item * (numbers + (0 if shape.own_head else prod(_head(shape))))
    if not shape.own_embedding:
        weights += (2 if engine.device == "cpu" else 4) * shape.vocab_size * shape.hidden_size
    token = item * 2 * shape.num_kv_heads * shape.head_dim
    tokens, rows = limits.kv_cache_tokens, limits.max_active_requests * engine.tree_width
    context = limits.max_active_requests * limits.max_context_tokens
    copies = 2 * token * min(context, tokens)
    return Footprint(
        engine.device, weights, token * tokens, copies + _LOGIT_BYTES * rows * _head(shape)[0]
    )


def latency_cases(*, target: bool) -> list[Case]:
    """Return a draft's cases but catching up: a head takes states with the target's passes."""
    return [case for case in cases.latency_cases(target=target) if case.run > 1]


def taps(folder: Path) -> tuple[int, ...]:
    """Return the target's layers, counted from 1, whose output the head reads."""
    return read_shape(folder).layers


def _head(shape: EagleShape) -> tuple[int, int]:
    return shape.draft_vocab_size, shape.hidden_size


def _kernels(engine: EngineConfig, threads: int) -> Callable[[RowWeights], RowProducts]:
    """Return what multiplies the matrices: int8 is OpenVINO's, which a GPU's machine may lack."""
    if engine.dtype != "int8":
        from backend.engines.eagle.model import TorchRows

        return TorchRows
    from backend.engines.eagle.openvino import OpenvinoRows

    precision = {"bf16": "bf16", "fp32": "f32"}[activations(engine)]
    return partial(OpenvinoRows, precision=precision, threads=threads)


def _check_fits(folder: Path, shape: EagleShape, target: Path, embedding: Tensor) -> None:
    """Raise ConfigError for a head of another target than that of ``embedding`` [vocab, hidden];
    warn of one whose weights have changed.
    """
    layers = manifest.layer_count(target)
    pairs = [
        ("vocab_size", shape.vocab_size, embedding.shape[0]),
        ("target_hidden_size", shape.target_hidden_size, embedding.shape[1]),
    ]
    if not shape.own_embedding:
        pairs.append(("hidden_size", shape.hidden_size, embedding.shape[1]))
    for name, value, expected in pairs:
        if value != expected:
            raise ConfigError(
                f"draft {folder}: {name} is {value}, its target {target} has {expected}"
            )
    if max(shape.layers) > layers:
        text = f"layers go to {max(shape.layers)}, its target {target} has {layers}"
        raise ConfigError(f"draft {folder}: {text}")
    prepared, weights = made_for(folder), manifest.weights_sha256(target)
    if prepared not in ("", weights):
        logger.warning(
            "draft %s was prepared for a target of the weights %s, %s has %s: its proposals may be "
            "accepted less often",
            *(folder, prepared[:12], target, weights[:12]),
        )
