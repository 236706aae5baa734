"""The configuration of a folder's decoder, and what is refused by ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from backend.engines.checkpoint import CheckpointError
from backend.kinds import quantization_of
from backend.storage.manifest import read_model_config

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Multimodal architectures whose text part was compared with their own forward."""

_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embedding whose angles depend on the longest sequence of a pass."""


def read_decoder_config(folder: Path) -> PretrainedConfig:
    """Return the configuration of the language model in a folder, of a multimodal one its text
    part. Raises CheckpointError with the reason for a folder that is not served.
    """
    raw = read_model_config(folder)
    architecture = architecture_of(raw)
    _check_source(folder, raw, architecture)
    try:
        whole: Any = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        refuse(folder, architecture, f"its config.json cannot be read: {error}")
    config: PretrainedConfig = whole.get_text_config(decoder=True)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or getattr(config, "is_encoder_decoder", False):
        refuse(folder, architecture, "it is not a causal language model for text")
    if config is not whole:
        if architecture not in WRAPPERS:
            reason = "Spindle serves the text part only of multimodal folders of"
            refuse(folder, architecture, f"{reason} {', '.join(WRAPPERS)}")
        config.tie_word_embeddings = whole.tie_word_embeddings
    elif architecture not in ("none", model_class.__name__):
        refuse(folder, architecture, f"its language model would be a {model_class.__name__}")
    config.architectures = [model_class.__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its weights are widened when they are read
    for reason in _reasons(config):
        refuse(folder, architecture, reason)
    return config


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the architecture that a ``config.json`` names first."""
    return str(next(iter(raw.get("architectures") or ["none"])))


def refuse(folder: Path, architecture: str, reason: str) -> NoReturn:
    """Raise CheckpointError for a folder that is not served."""
    raise CheckpointError(f"{folder}: {architecture} cannot be served: {reason}")


def _check_source(folder: Path, raw: Mapping[str, Any], architecture: str) -> None:
    """Refuse what is not in transformers, and weights in a format that is not read."""
    kind = raw.get("model_type")
    in_library = kind in CONFIG_MAPPING and (
        architecture == "none" or hasattr(transformers, architecture)
    )
    if raw.get("auto_map") and not in_library:
        refuse(folder, architecture, "its code is in the folder (trust_remote_code), and never run")
    if not in_library:
        version = transformers.__version__
        refuse(
            folder, architecture, f"transformers {version} has no such model (model_type {kind!r})"
        )
    if raw.get("draft_vocab_size"):
        refuse(folder, architecture, "its head covers only a part of the vocabulary")
    if reason := quantization_of(raw)[1]:
        refuse(folder, architecture, f"its weights are quantised: {reason}. Give it in bf16")


def _reasons(config: PretrainedConfig) -> Iterator[str]:
    """Yield what in a configuration no engine can serve."""
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        yield "its chunked attention is not passed on to the attention function"
    compressed = [kind for kind in kinds if "compressed" in kind]
    if compressed:
        yield f"its layers ({compressed[0]}) attend to tokens in compressed form"
    if getattr(config, "kv_lora_rank", None):
        yield "MLA, whose latent does not fit our KV pool"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        yield "its layers attend to later tokens, too"
    for rope in _ropes(config):
        if rope in _ROPES_BY_LENGTH:
            yield f"rope_type {rope!r}, whose angles depend on the length of a sequence"


def _ropes(config: PretrainedConfig) -> Iterator[str]:
    """Yield the types of a configuration's rotary embeddings, which may differ by type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        yield rope.get("rope_type") or "default"
