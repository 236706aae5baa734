"""Tensors of a Hugging Face folder by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from backend.checked_settings import ConfigError
from backend.engines.quantized import QuantizedError, widen
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import weight_files

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Number formats that weights are read in."""


UNUSED = "rotary_emb.inv_freq"
"""The end of the names of tensors that are computed, not read."""


class CheckpointError(ConfigError):
    """A model folder that cannot be served; the message names the file, tensor or setting."""


Weights = dict[str, torch.Tensor]


def read_weights(folder: Path) -> Weights:
    """Return the tensors of a folder by name, quantised ones widened. Raises CheckpointError."""
    return widen_stored(folder, read_stored(folder))


def read_stored(folder: Path) -> Weights:
    """Return the tensors of a folder by name. Raises CheckpointError."""
    weights: Weights = {}
    for file in weight_files(folder):
        for name, tensor in _read_tensors(file).items():
            if name in weights:
                raise CheckpointError(f"{file}: tensor {name} is in two files")
            weights[name] = tensor
    return weights


def widen_stored(folder: Path, weights: Weights) -> Weights:
    """Return a folder's tensors with quantised ones widened. Raises CheckpointError."""
    quantization = read_model_config(folder).get("quantization_config")
    if not quantization:
        return weights
    try:
        return widen(weights, quantization)
    except QuantizedError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_embeddings(folder: Path, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's embedding and head [vocab, hidden], as they are stored; on the host they
    stay in the file, and only what is asked for is read. Raises CheckpointError for a folder
    without them.
    """
    found = read_weights(folder)
    text = {name.removeprefix("model.").removeprefix("language_model."): name for name in found}
    place = text.get("embed_tokens.weight") or text.get("model.embed_tokens.weight")
    if place is None:
        raise CheckpointError(f"{folder} has no embed_tokens.weight")
    embedding = found[place]
    head = found.get(text.get("lm_head.weight", ""))
    if head is None or read_model_config(folder).get("tie_word_embeddings"):
        head = embedding
    return embedding.to(device), head.to(device)


def read_rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the rope settings of ``rope_parameters`` (transformers 5) or of ``rope_scaling``
    (before).
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    needed = {
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    for name in needed.get(rope["rope_type"], ()):
        if name not in rope:
            raise CheckpointError(f"{where}: rope_type {rope['rope_type']!r} needs {name}")
    return rope


def _read_tensors(path: Path) -> Weights:
    from safetensors import (  # not wanted by engines of weights that are in memory
        SafetensorError,
        safe_open,
    )

    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
                if not name.endswith(UNUSED)
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
