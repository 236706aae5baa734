"""Random EAGLE-3 heads, and their published forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from backend import PROJECT_ROOT
from backend.engines.eagle.dialects import TargetShape
from backend.engines.eagle.folder import WEIGHTS_FILE, EagleShape, read_shape, save
from backend.storage.manifest import vocabulary_sha256

SHAPE = EagleShape(
    vocab_size=96,
    draft_vocab_size=40,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(2, 4, 5),
)


def random_head(seed: int = 0, **changes: Any) -> tuple[EagleShape, dict[str, torch.Tensor]]:
    """Return a shape, ``SHAPE`` with ``changes``, and random tensors of it."""
    shape = replace(SHAPE, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        if name == "token_ids":
            ids = torch.randperm(shape.vocab_size, generator=generator)
            tensors[name] = ids[: shape.draft_vocab_size].sort().values
        elif len(size) == 1:
            tensors[name] = 1 + 0.3 * torch.randn(size, generator=generator)
        else:
            scale = 1.0 if "embed" in name else 2.0 / size[1] ** 0.5
            tensors[name] = scale * torch.randn(size, generator=generator)
    return shape, tensors


TINY_TARGET = PROJECT_ROOT / "engines_build/drafts/tiny-target"
_ITS_SIZES = {"vocab_size": 4096, "hidden_size": 256, "target_hidden_size": 256}


def converted(folder: Path, target_sha256: str = "", **changes: Any) -> Path:
    """Write a random head of ``TINY_TARGET`` in converted form."""
    shape, tensors = random_head(**{**_ITS_SIZES, "layers": (1, 2, 3), **changes})
    vocabulary = vocabulary_sha256(TINY_TARGET / "tokenizer.json")
    known = {"vocabulary_sha256": vocabulary, "target_sha256": target_sha256}
    save(folder, shape, tensors, known)
    return folder


def read(folder: Path) -> tuple[EagleShape, dict[str, torch.Tensor]]:
    """Return the shape and the tensors of a converted head."""
    return read_shape(folder), load_file(folder / WEIGHTS_FILE)


TARGET = TargetShape(hidden_size=32, vocab_size=96, num_layers=8)
"""The target of ``SHAPE``."""

DIALECTS = ("SafeAILab", "flat", "speculators")


def published(
    dialect: str, shape: EagleShape, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return ``config.json`` and tensors as a publisher would write them."""
    named = {
        name if name.split(".")[0] in _OUTSIDE else f"layers.0.{name}": tensor
        for name, tensor in tensors.items()
    }
    ids = named.pop("token_ids")
    if shape.draft_vocab_size != shape.vocab_size:
        named["d2t"] = ids - torch.arange(len(ids))
        named["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
        named["t2d"][ids] = True
    config = {
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.trained_tokens,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
    }
    return _WRITERS[dialect](shape, config, named)


_OUTSIDE = ("fc", "fc_norm", "input_norm", "norm", "embed_tokens", "lm_head", "token_ids")


def _safeailab(shape: EagleShape, config: Any, named: Any) -> Any:
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
        "torch_dtype": "float16",
    }
    return config, {name.replace("layers.0.", "midlayer."): t for name, t in named.items()}


def _flat(shape: EagleShape, config: Any, named: Any) -> Any:
    named.pop("t2d", None)
    rope = dict(shape.rope)
    inner: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.layers],
        "use_aux_hidden_state": True,
    }
    if shape.fuse == "joint":
        inner["norm_before_fc"] = True
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_config": inner,
        "fc_norm": shape.fuse == "each",
        "head_dim": shape.head_dim,
        "norm_output": shape.norm_output,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": shape.rope_theta,
    }
    return config, named


def _speculators(shape: EagleShape, config: Any, named: Any) -> Any:
    layer = config | {
        "head_dim": shape.head_dim,
        "rope_parameters": {"rope_theta": shape.rope_theta, **shape.rope},
    }
    if shape.sliding_window:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": shape.sliding_window}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "fc_norm": shape.fuse == "each",
        "norm_before_fc": shape.fuse == "joint",
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }
    named["verifier_norm.weight"] = torch.ones(shape.target_hidden_size)
    return config, named


_WRITERS = {"SafeAILab": _safeailab, "flat": _flat, "speculators": _speculators}


def write(
    folder: Path, dialect: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """Write a published folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if dialect == "SafeAILab":
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        save_file(
            {n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors"
        )
    return folder
