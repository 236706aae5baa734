"""A Hugging Face folder read without torch: matrices by their rows, and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from backend.checked_settings import ConfigError
from backend.sampling.distributions import Floats
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import shapes_in, weight_files

NUMBER_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
"""Number formats that weights are read in, and the bytes of a number."""

UNUSED = "rotary_emb.inv_freq"
"""The end of the names of tensors that are computed, not read."""

_T = TypeVar("_T")

Rows = npt.NDArray[np.int64] | Seq[int] | slice
Stored = npt.NDArray[Any]
"""Numbers as a file has them, those in bf16 as their bits."""
Bits = npt.NDArray[np.uint16]
"""Numbers in bf16, which NumPy does not have."""

_KINDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
_KINDS |= {"I32": np.int32, "I64": np.int64}
"""By safetensors' names, how arrays hold a tensor."""


class CheckpointError(ConfigError):
    """A model folder that cannot be served; the message names the file, tensor or setting."""


class Matrix(Protocol):
    """A matrix [rows, columns] that returns the rows asked for."""

    def __getitem__(self, rows: Rows, /) -> Floats:
        """Return these rows [n, columns]."""
        ...


class StoredMatrix:
    """A matrix that stays in its file; only what is asked for is read, as fp32."""

    def __init__(
        self,
        stored: Stored,  # [rows, columns]
    ) -> None:
        self._stored = stored
        self.shape = stored.shape

    def __getitem__(self, rows: Rows) -> Floats:
        """Return these rows [n, columns] (``Matrix``)."""
        return _in_fp32(self._stored[rows])


def widen(
    bits: npt.NDArray[Any],  # of any shape, such as [rows, columns]; 2 bytes each
) -> npt.NDArray[np.float32]:
    """Return numbers in bf16, by their bits, as fp32."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(
    numbers: Floats,  # of any shape, such as [rows, columns]
) -> Bits:
    """Return the bits of numbers rounded to bf16, halves to even."""
    bits = numbers.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


def read_arrays(file: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a safetensors file by name; floating-point numbers are fp32. Raises
    ConfigError for a file that is damaged or has others.
    """
    return {
        name: stored.copy() if np.issubdtype(stored.dtype, np.signedinteger) else _in_fp32(stored)
        for name, stored in map_file(file).items()
    }


def map_embeddings(folder: Path) -> tuple[StoredMatrix, StoredMatrix] | None:
    """Return a model's embedding and head [vocab, hidden] in their files; None where one of them
    may be quantised. Raises CheckpointError for a folder without them.
    """
    arrays: dict[str, Stored] = {}
    config = read_model_config(folder)
    is_quantized, is_tied = (
        bool(config.get(key)) for key in ("quantization_config", "tie_word_embeddings")
    )
    try:
        for file in weight_files(folder):
            arrays |= map_file(file, "embed_tokens.weight", "lm_head.weight")
    except CheckpointError:
        if is_quantized:  # to 8 bits
            return None
        raise
    if is_quantized and len(arrays) + is_tied < 2:
        return None
    embedding, head = find_embeddings(folder, arrays)
    return StoredMatrix(embedding), StoredMatrix(head)


def find_embeddings(folder: Path, tensors: Mapping[str, _T]) -> tuple[_T, _T]:
    """Return a model's embedding and head among its tensors. Raises CheckpointError for a folder
    without them.
    """
    text = {name.removeprefix("model.").removeprefix("language_model."): name for name in tensors}
    place = text.get("embed_tokens.weight") or text.get("model.embed_tokens.weight")
    if place is None:
        raise CheckpointError(f"{folder} has no embed_tokens.weight")
    embedding = tensors[place]
    head = tensors.get(text.get("lm_head.weight", ""))
    if head is None or read_model_config(folder).get("tie_word_embeddings"):
        head = embedding
    return embedding, head


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


def _in_fp32(
    stored: Stored,  # of any shape, such as [rows, columns]
) -> Floats:
    return widen(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def map_file(file: Path, *ends: str) -> dict[str, Stored]:
    """Return the tensors of a file by name, mapped and not read yet: all, or those with one of
    these ends. Raises ConfigError for one that is damaged, and for tensors of other kinds.

    safetensors' own reader for NumPy refuses bf16.
    """
    shapes_in(file)  # the library's own checks
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    arrays: dict[str, Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__" or not name.endswith(ends or ("",)):
            continue
        kind = _KINDS.get(entry["dtype"])
        if kind is None:
            raise CheckpointError(f"{file}: {name} is in {entry['dtype']}, which is not read here")
        begin = 8 + size + entry["data_offsets"][0]
        arrays[name] = np.memmap(file, kind, "r", begin, tuple(entry["shape"]))
    return arrays
