"""Weights of a plain Llama by name, for the forwards that we build of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backend.engines.checkpoint import UNUSED, CheckpointError
from backend.engines.models.reading import read_spec
from backend.engines.models.spec import PlainLlama
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import tensor_shapes

if TYPE_CHECKING:
    from backend.engines.weights import Weights


def read_llama(folder: Path) -> PlainLlama:
    """Return the description of a folder's Llama. Raises ConfigError for a folder that is not
    served, and for another decoder.
    """
    spec = read_spec(folder)
    if spec.llama is None:
        raise CheckpointError(f"{folder}: {spec.architecture} is more than a Llama")
    return spec.llama


def load_llama(folder: Path, dtype: str, device: str = "cpu") -> tuple[PlainLlama, Weights]:
    """Return the description of a folder's Llama and its weights, as ``load_weights`` does."""
    llama = read_llama(folder)
    return llama, load_weights(folder, llama, dtype, device)


def load_weights(folder: Path, llama: PlainLlama, dtype: str, device: str = "cpu") -> Weights:
    """Return a folder's weights, by Hugging Face name, in ``dtype`` (one of ``DTYPES``) on
    ``device``. Raises CheckpointError for a file that is damaged, and for tensors that are missing,
    unexpected or mis-shaped.
    """
    from backend.engines.weights import DTYPES, read_weights

    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    weights = read_weights(folder)
    if llama.ties_embeddings:
        weights.pop("lm_head.weight", None)  # some writers store the tied head again
    _compare(llama, {name: tuple(one.shape) for name, one in weights.items()}, folder)
    return {name: one.to(device, DTYPES[dtype]) for name, one in weights.items()}


def check_tensors(folder: Path) -> None:
    """Raise ConfigError unless a folder's tensors are those of its ``config.json``, by the headers
    of its files. Quantised weights, and families that are more than a Llama, are compared when they
    are loaded.
    """
    llama = read_spec(folder).llama
    if llama is None or read_model_config(folder).get("quantization_config"):
        return
    shapes = {n: s for n, s in tensor_shapes(folder).items() if not n.endswith(UNUSED)}
    if llama.ties_embeddings:
        shapes.pop("lm_head.weight", None)
    _compare(llama, shapes, folder)


def _compare(llama: PlainLlama, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise CheckpointError unless the tensors of these shapes are exactly a model's."""
    expected = llama.shapes()
    unexpected = sorted(name for name in shapes if name not in expected)
    if unexpected:
        raise CheckpointError(
            f"{folder}: unexpected tensor {unexpected[0]} ({len(unexpected)} in all)"
        )
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} must have shape {list(shape)}, got {list(shapes[name])}"
            )
