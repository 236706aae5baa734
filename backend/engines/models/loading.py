"""Weights of a folder in transformers' modules, refusing what would leave some at random."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import ATTENTION
from backend.engines.models.configuration import read_decoder_config
from backend.engines.weights import DTYPES, Weights, read_weights
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import weight_files

_TEXT_PART = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
"""Names in multimodal folders and those in a language model alone."""

_OTHER_PARTS = ("audio", "embed_audio", "embed_vision", "multi_modal", "vision")
"""Beginnings of the names of what else a multimodal folder has."""


def load_decoder(
    folder: Path,
    dtype: str = "bf16",
    device: str | torch.device = "cpu",
    weights: Weights | None = None,
    **options: Any,
) -> nn.Module:
    """Return a folder's language model in ``dtype`` (one of ``DTYPES``), ready for inference, whose
    attention is ``ATTENTION``. ``weights`` are loaded instead of the folder's; ``options`` are more
    of ``from_pretrained``.

    Raises ConfigError for a folder that is not served, a file that is missing or damaged, and
    tensors that are missing, left over or of another shape.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = read_decoder_config(folder)
    weight_files(folder)  # transformers does not look where an index leads
    logging.disable_progress_bar()
    experts = {"experts_implementation": "eager"} if dtype == "fp64" else {}  # others have no fp64
    quantized = bool(read_model_config(folder).get("quantization_config"))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    source = {"state_dict": weights or read_weights(folder)} if quantized else {}
    try:
        loaded = model_class.from_pretrained(
            None if quantized else folder,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            key_mapping=_TEXT_PART,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            **source | experts | options,
        )
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
    lm: nn.Module = loaded[0]
    _check(folder, loaded[1])
    return lm.eval().to(device)


def _check(folder: Path, report: dict[str, Iterable[Any]]) -> None:
    """Raise CheckpointError unless the folder's tensors are exactly the model's."""
    left_over = [name for name in report["unexpected_keys"] if not _is_other_part(name)]
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{folder}: tensor {name} must have shape {list(wanted)}, as config.json says, "
            f"and has {list(stored)}"
        )
    for what, names in (
        ("is missing", report["missing_keys"]),
        ("is not one of the model's", left_over),
    ):
        wrong = sorted(map(str, names))
        if wrong:
            raise CheckpointError(f"{folder}: tensor {wrong[0]} {what} ({len(wrong)} such tensors)")
    for error in report.get("error_msgs") or ():
        raise CheckpointError(f"{folder}: {error}")


def _is_other_part(name: str) -> bool:
    return name.removeprefix("model.").startswith(_OTHER_PARTS)
