"""The files of a published draft head, as their publisher wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.published_heads import PICKLES, SAFETENSORS
from backend.settings import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its name there. Only tensors of a pickle are read: code in
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
        raise ConfigError(f"{file} is not a dictionary of tensors")
    return found
