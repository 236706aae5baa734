"""Tensors of a Hugging Face folder by their names, for torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from backend.engines.checkpoint import UNUSED, CheckpointError, StoredMatrix, find_embeddings
from backend.engines.quantized import QuantizedError, widen
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import WEIGHTS, weight_files

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Number formats that weights are read in."""

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
    embedding, head = find_embeddings(folder, read_weights(folder))
    return embedding.to(device), head.to(device)


def save_embeddings(folder: Path, out: Path) -> None:
    """Write a model's embedding and head, widened, as a folder that ``map_embeddings`` reads."""
    from safetensors.torch import save_file

    embedding, head = load_embeddings(folder)
    is_tied = head is embedding
    tables = {"embed_tokens.weight": embedding} | ({} if is_tied else {"lm_head.weight": head})
    save_file({name: table.contiguous() for name, table in tables.items()}, out / WEIGHTS)
    (out / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}), "utf-8")


def stored_matrix(
    matrix: torch.Tensor,  # [rows, columns]
) -> StoredMatrix:
    """Return a matrix of the host in the form that engines without torch read."""
    is_half = matrix.dtype == torch.bfloat16
    return StoredMatrix((matrix.view(torch.uint16) if is_half else matrix).numpy())


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
