"""The files of a published draft head, as their publisher wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.files import check_content
from backend.published_heads import PICKLES, SAFETENSORS
from backend.settings import ConfigError
from backend.storage.weight_files import INDEX, shapes_in, weight_files

if TYPE_CHECKING:
    from torch import Tensor


def files_of(folder: Path) -> list[Path]:
    """Return the files that hold a head's tensors. Raises ConfigError where there are none, and
    for one that is missing, damaged, or only a Git LFS pointer.
    """
    if (folder / INDEX).exists():
        files = weight_files(folder)
    else:
        files = sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(PICKLES))
    if not files:
        raise ConfigError(f"{folder} has neither {SAFETENSORS} nor {PICKLES}")
    for file in files:
        check_content(file)
        if file.suffix == ".safetensors":
            shapes_in(file)
    return files


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its name there. Only tensors of a pickle are read: code in
    it is an error. Raises ConfigError naming the file.
    """
    tensors: dict[str, Tensor] = {}
    for file in files_of(folder):
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
