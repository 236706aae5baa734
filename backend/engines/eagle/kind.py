"""Answers of the kind ``eagle`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
    is_converted,
    is_ours,
    made_for,
    place_of,
    read_shape,
    served_folder,
)
from backend.engines.eagle.published import files_of, other_kind
from backend.engines.latency_cases import Case
from backend.engines.memory import available_bytes
from backend.engines.port import Engine, Footprint
from backend.machine import machine
from backend.sequence import BLOCK_TOKENS
from backend.storage import cache, manifest
from backend.storage.weight_files import shapes_in

if TYPE_CHECKING:
    from backend.engines.checkpoint import Stored
    from backend.engines.eagle.engine import EagleModel
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
    from backend.engines.eagle.engine import EagleEngine
    from backend.engines.eagle.folder import load

    folder, target = service.path(engine), service.path(service.config.target)
    shape, tensors = load(folder)
    _check_fits(folder, shape, target)
    model = _make_model(engine, service, shape, tensors)
    text = "%s: an EAGLE-3 head of %d tokens on layers %s, %s"
    logger.info(text, engine.name, shape.draft_vocab_size, list(shape.layers), engine.dtype)
    width, sizes = engine.tree_width, service.sizes
    return EagleEngine(engine.name, model, **sizes, width=width, count=service.count)


def _make_model(
    engine: EngineConfig,
    service: Service,
    shape: EagleShape,
    tensors: Mapping[str, Stored],  # as in ``folder``: fc.weight [h, n H] and others
) -> EagleModel:
    """Return a head where it runs: on CPUs on OpenVINO, which a GPU's machine may lack."""
    target, sizes = service.path(service.config.target), service.sizes
    room = {
        "positions": sizes["max_context_tokens"] + sizes["max_draft_tokens"],
        "slots": sizes["kv_blocks"] * BLOCK_TOKENS,
    }
    if _runs_on_openvino(engine):
        from backend.engines.eagle.openvino import OpenvinoModel
        from backend.engines.models.reading import bring_embeddings

        embedding, lm_head = bring_embeddings(target)
        return OpenvinoModel(
            shape,
            tensors,
            embedding=embedding,
            lm_head=lm_head,
            rounded=engine.dtype == "int8",
            narrow=activations(engine) == "bf16",
            threads=service.threads,
            **room,
        )
    with cache.require_packages(f"running {engine.name} on {engine.device} in {engine.dtype}"):
        import torch

    from backend.engines.checkpoint import StoredMatrix
    from backend.engines.eagle.model import TorchModel
    from backend.engines.weights import DTYPES, load_embeddings

    torch.set_num_threads(service.threads)
    tables = load_embeddings(target, engine.device)
    ids = torch.from_numpy(tensors["token_ids"].copy())
    weights = {name: torch.from_numpy(StoredMatrix(one)[:]) for name, one in tensors.items()}
    return TorchModel(
        shape,
        weights | {"token_ids": ids},
        embedding=tables[0],
        lm_head=tables[1],
        dtype=DTYPES[activations(engine)],
        device=engine.device,
        **room,
    )


def _runs_on_openvino(engine: EngineConfig) -> bool:
    return engine.device == "cpu" and engine.dtype != "fp64" and engine.kind.runs_int8


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
    """Convert a published folder unless the cache has it converted for this target; widen the
    target's embedding if it is quantised, unless the cache has it.
    """
    target = service.config.target
    path = service.path(target)
    if _runs_on_openvino(engine):
        from backend.engines.models.reading import bring_embeddings

        bring_embeddings(path, say)
    if is_ours(folder) or is_converted(place_of(folder), path):
        return
    with cache.require_packages(f"converting {folder}"):
        from backend.engines.eagle.conversion import bring_head
    narrow = target.device != "cpu" or machine.multiplies_bf16()
    dtype = "bf16" if narrow else "fp32"
    free = available_bytes(target)
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
    kv_item = NUMBER_BYTES["fp32"] if _runs_on_openvino(engine) else item
    token = kv_item * 2 * shape.num_kv_heads * shape.head_dim
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


def _check_fits(folder: Path, shape: EagleShape, target: Path) -> None:
    """Raise ConfigError for a head of another target; warn of one whose weights have changed."""
    from backend.engines.models.reading import read_spec

    spec, layers = read_spec(target), manifest.layer_count(target)
    pairs = [
        ("vocab_size", shape.vocab_size, spec.vocab_size),
        ("target_hidden_size", shape.target_hidden_size, spec.hidden_size),
    ]
    if not shape.own_embedding:
        pairs.append(("hidden_size", shape.hidden_size, spec.hidden_size))
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
