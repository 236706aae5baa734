"""Read a Hugging Face folder (config.json and safetensors) of a Llama-family model, refusing what
the lean forward would get wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from backend.engines.quantized import QuantizedError, widen
from backend.kinds import misfit_of_llama
from backend.settings import ConfigError
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import tensor_shapes, weight_files

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Number formats that weights are read in."""


_UNUSED = "rotary_emb.inv_freq"
"""The end of the names of tensors that are computed, not read."""


class CheckpointError(ConfigError):
    """A model folder that cannot be served; the message names the file, tensor or setting."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model.

    ``rope`` holds ``rope_type`` and its parameters in the names of transformers'
    ``rope_parameters``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    max_position_embeddings: int = 2048
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def weights(self) -> int:
        """Numbers in all matrices together, each counted once."""
        return sum(map(prod, self.shapes().values()))

    @property
    def looked_up(self) -> int:
        """Numbers in the matrix of embeddings."""
        return self.vocab_size * self.hidden_size

    @property
    def experts(self) -> int:
        """Numbers in the matrices of experts; a Llama has none."""
        return 0

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in all layers together."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def row_width(self) -> int:
        """Numbers that a layer makes of a token."""
        kv = 2 * self.num_kv_heads * self.head_dim
        attention = 2 * (self.num_heads * self.head_dim + kv)  # qkv, and again once rotated
        return 4 * self.hidden_size + attention + 3 * self.intermediate_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that a checkpoint of this model must hold, by its
        Hugging Face name.
        """
        hidden, ffn, head = self.hidden_size, self.intermediate_size, self.head_dim
        widths = {
            "q_proj": self.num_heads * head,
            "k_proj": self.num_kv_heads * head,
            "v_proj": self.num_kv_heads * head,
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            at = f"model.layers.{index}."
            shapes |= {
                at + "input_layernorm.weight": (hidden,),
                at + "post_attention_layernorm.weight": (hidden,),
            }
            for name, width in widths.items():
                shapes[f"{at}self_attn.{name}.weight"] = (width, hidden)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{name}.bias"] = (width,)
            shapes[at + "self_attn.o_proj.weight"] = (hidden, self.num_heads * head)
            if self.output_bias:
                shapes[at + "self_attn.o_proj.bias"] = (hidden,)
            shapes |= {
                at + "mlp.gate_proj.weight": (ffn, hidden),
                at + "mlp.up_proj.weight": (ffn, hidden),
            }
            shapes[at + "mlp.down_proj.weight"] = (hidden, ffn)
        return shapes


Weights = dict[str, torch.Tensor]


def load(
    folder: str | Path, dtype: str = "bf16", device: str = "cpu"
) -> tuple[LlamaConfig, Weights]:
    """Return the configuration and the weights, by Hugging Face name, in ``dtype`` (one of
    ``DTYPES``) on ``device``.

    Raises CheckpointError for a missing or damaged file, another architecture, or tensors that are
    missing, unexpected or mis-shaped.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = Path(folder)
    config = read_config(folder)
    weights = read_weights(folder)
    if config.tied:
        weights.pop("lm_head.weight", None)  # some writers store the tied head again
    check_weights(config, weights, str(folder))
    return config, {name: _convert(tensor, dtype, device) for name, tensor in weights.items()}


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
    found = read_weights(folder)
    text = {name.removeprefix("model.").removeprefix("language_model."): name for name in found}
    place = text.get("embed_tokens.weight") or text.get("model.embed_tokens.weight")
    if place is None:
        raise CheckpointError(f"{folder} has no embed_tokens.weight")
    embedding = found[place]
    head = found.get(text.get("lm_head.weight", ""))
    if head is None or read_model_config(folder).get("tie_word_embeddings"):
        head = embedding
    return embedding.to(device), head.to(device)


def read_config(folder: Path) -> LlamaConfig:
    """Return the configuration in a folder. Raises CheckpointError when it is missing, damaged or
    not supported.
    """
    return parse_config(read_model_config(folder), str(folder / "config.json"))


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
    """Turn a decoded ``config.json`` (of transformers 4 or 5) into a LlamaConfig; CheckpointError
    names what is not supported.
    """
    if misfit := misfit_of_llama(raw):
        raise CheckpointError(f"{where}: {misfit} is not supported")
    qwen2 = raw["architectures"][0] == "Qwen2ForCausalLM"
    rope = read_rope(raw, where)
    try:
        config = LlamaConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rope=rope,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tied=raw.get("tie_word_embeddings", False),
            qkv_bias=qwen2 or raw.get("attention_bias", False),
            output_bias=not qwen2 and raw.get("attention_bias", False),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing") from None
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return config


def check_tensors(folder: Path) -> None:
    """Raise ConfigError unless a folder's tensors are those of its ``config.json``, by the headers
    of its files. Quantised weights, and families that transformers builds, are compared when they
    are loaded.
    """
    raw = read_model_config(folder)
    if misfit_of_llama(raw) or raw.get("quantization_config"):
        return
    config = read_config(folder)
    shapes = {n: s for n, s in tensor_shapes(folder).items() if not n.endswith(_UNUSED)}
    if config.tied:
        shapes.pop("lm_head.weight", None)
    check_shapes(config, shapes, str(folder))


def check_weights(
    config: LlamaConfig, weights: Mapping[str, torch.Tensor], where: str = "weights"
) -> None:
    """Raise CheckpointError unless the tensors are exactly those of ``config.shapes()``."""
    check_shapes(config, {name: tuple(one.shape) for name, one in weights.items()}, where)


def check_shapes(config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError unless the tensors are exactly those of ``config.shapes()``."""
    expected = config.shapes()
    unexpected = sorted(name for name in shapes if name not in expected)
    if unexpected:
        raise CheckpointError(
            f"{where}: unexpected tensor {unexpected[0]} ({len(unexpected)} in all)"
        )
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(f"{where}: tensor {name} is missing")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{where}: tensor {name} must have shape {list(shape)}, got {list(shapes[name])}"
            )


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
                if not name.endswith(_UNUSED)
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _convert(tensor: torch.Tensor, dtype: str, device: str) -> torch.Tensor:
    return tensor.to(device, DTYPES[dtype] if tensor.is_floating_point() else torch.int64)
