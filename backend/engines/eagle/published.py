"""The files of a published draft head, as their publisher wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.config import ConfigError
from backend.storage.manifest import read_model_config

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, PICKLES = "*.safetensors", "pytorch_model*.bin"

_MARKS = (
    "dflash_config",
    "eagle_config",
    "medusa_num_heads",
    "speculators_config",
    "speculators_model_type",
)
"""Keys of ``config.json`` that a model that is no draft lacks."""

_ARCHITECTURES = ("DFlash", "Eagle", "MLPSpeculator", "Medusa")
"""Parts of the architectures of draft heads."""

_ONLY_IN_HEADS = ("fc.weight", "hidden_norm.weight")
"""Ends of tensor names that a decoder lacks."""

_LONGEST_HEADER = 1 << 26


def is_head(folder: Path) -> bool:
    """Return whether a folder is that of a published draft head, one that we serve or not. Its
    weights are not read.
    """
    if not (folder / "config.json").is_file():
        return False
    config = read_model_config(folder)
    names = config.get("architectures") or ()
    if any(mark in config for mark in _MARKS):
        return True
    if any(part in name for name in names for part in _ARCHITECTURES):
        return True
    files = sorted(folder.glob(SAFETENSORS))
    if not files:  # no decoder that we serve is a pickle
        return "draft_vocab_size" in config and any(folder.glob(PICKLES))
    return any(name.endswith(_ONLY_IN_HEADS) for file in files for name in _names_in(file))


def _names_in(file: Path) -> list[str]:
    """Return the names of a safetensors file's tensors; none where its header cannot be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return list(json.loads(stream.read(min(length, _LONGEST_HEADER))))
        except ValueError:
            return []


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its name there. Of a pickle only tensors are read: code in
    it is an error. Raises ConfigError naming the file.
    """
    files = sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(PICKLES))
    if not files:
        raise ConfigError(f"{folder} has neither {SAFETENSORS} nor {PICKLES}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read(file).items():
            if name in tensors:
                raise ConfigError(f"{file}: tensor {name} is in two files")
            tensors[name] = tensor
    return tensors


def _read(file: Path) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except Exception as error:  # pickle's own, which nothing here imports
        line = str(error).splitlines()[0]
        raise ConfigError(f"{file} holds more than tensors and is not read: {line}") from error
    if not isinstance(found, dict) or not all(torch.is_tensor(one) for one in found.values()):
        raise ConfigError(f"{file} is no dictionary of tensors")
    return found
