"""Which folders are those of published draft heads, without a look at their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAFETENSORS, PICKLES = "*.safetensors", "pytorch_model*.bin"

CONVERTED = "SpindleEagle"
"""The architecture of the form that they are converted to."""

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

_ONLY_IN_HEADS = (".fc.weight", ".hidden_norm.weight")
"""Ends of tensor names that a decoder lacks."""


def is_published_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a folder with this ``config.json`` is that of a published draft head, one that
    we serve or not.
    """
    names = config.get("architectures") or ()
    if any(mark in config for mark in _MARKS):
        return True
    if any(part in name for name in names for part in _ARCHITECTURES):
        return True
    files = sorted(folder.glob(SAFETENSORS))
    if not files:  # no decoder that we serve is a pickle
        return "draft_vocab_size" in config and any(folder.glob(PICKLES))
    return any(f".{name}".endswith(_ONLY_IN_HEADS) for file in files for name in _names_in(file))


def _names_in(file: Path) -> list[str]:
    """Return the names of a safetensors file's tensors; none where its header cannot be read."""
    from safetensors import SafetensorError, safe_open  # `doctor` runs without packages

    try:
        with safe_open(file, "numpy") as tensors:
            return list(tensors.keys())
    except SafetensorError:
        return []
