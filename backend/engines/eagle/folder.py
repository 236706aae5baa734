"""The one form that every published EAGLE-3 head is converted to, and that engines read.

A converted folder has a ``config.json`` (``EagleShape``, and what it was made from) and a
``model.safetensors``. Engines call ``load``::

    shape, tensors = load(folder)

``tensors`` are stored as published (bf16, fp16 or fp32), by these names. h is ``hidden_size``, H
``target_hidden_size``, n the number of ``layers``, D ``draft_vocab_size``, V ``vocab_size``, d
``head_dim``.

| name | shape | is there |
| --- | --- | --- |
| ``token_ids`` | int64[D], different, below V | always: row r proposes ``token_ids[r]`` |
| ``fc.weight`` | [h, n H] | always |
| ``fc.bias`` | [h] | ``fc_bias`` |
| ``input_norm.weight`` | [n H] | ``fuse`` is ``joint`` |
| ``fc_norm.{i}.weight``, i below n | [H] | ``fuse`` is ``each`` |
| ``input_layernorm.weight`` | [h] | always: of the token's embedding |
| ``hidden_norm.weight`` | [h] | always: of the state |
| ``post_attention_layernorm.weight`` | [h] | always |
| ``self_attn.q_proj.weight`` | [num_heads d, 2h] | always |
| ``self_attn.k_proj.weight``, ``v_proj`` | [num_kv_heads d, 2h] | always |
| ``self_attn.o_proj.weight`` | [h, num_heads d] | always |
| ``self_attn.q_norm.weight``, ``k_norm`` | [d] | ``qk_norm`` |
| ``mlp.gate_proj.weight``, ``up_proj`` | [intermediate_size, h] | always |
| ``mlp.down_proj.weight`` | [h, intermediate_size] | always |
| ``norm.weight`` | [h] | always: before the head |
| ``embed_tokens.weight`` | [V, h] | ``own_embedding``; else it is the target's |
| ``lm_head.weight`` | [D, h] | ``own_head``; else ``token_ids``' rows of the target's |

All norms are RMS norms with ``rms_norm_eps``. For a row with token t and the target's states s at
the place before it, the forward is::

    f = fc(fused s)                          # fused: as ``fuse`` says
    g = hidden_norm(f)
    x = cat(input_layernorm(embed(t)), g)    # what q, k and v read
    y = (g if norm_before_residual else f) + o_proj(attention(x))
    z = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(z))                # of rows; ``token_ids`` maps them to tokens

A drafted row has, in place of f, its parent's z, or norm(z) with ``norm_output``.

The cache has a place for the converted form of each published folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.checked_settings import ConfigError
from backend.engine_config import EngineConfig
from backend.engines.registry import NotPreparedError
from backend.machine import machine
from backend.published_heads import CONVERTED, PICKLES, SAFETENSORS
from backend.storage import cache
from backend.storage.manifest import read_model_config, sampled_sha256, weights_sha256

if TYPE_CHECKING:
    from torch import Tensor

    from backend.engines.checkpoint import Stored

ARCHITECTURE = CONVERTED
WEIGHTS_FILE = "model.safetensors"

FUSES = ("plain", "joint", "each")
"""Norms before ``fc``: none, one of all states together, one of each layer's."""
FORMAT = 1
"""Raised when the same folder would be converted to another one."""


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The shape of a head and the flags of its forward."""

    vocab_size: int
    """The target's vocabulary, V."""
    draft_vocab_size: int
    """Tokens that it can propose, D."""
    hidden_size: int
    """Its own width, h."""
    target_hidden_size: int
    """The width of the target's states, H."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    """The target's layers whose output it reads, counted from 1, in the order of ``fc``."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    """``rope_type`` (``models.rope.ROPE_TYPES``) and its parameters."""
    fuse: str = "plain"
    """One of ``FUSES``."""
    fc_bias: bool = False
    norm_before_residual: bool = False
    """The residual is the normed state."""
    norm_output: bool = False
    """A drafted row goes on from the output after the last norm."""
    qk_norm: bool = False
    own_embedding: bool = False
    own_head: bool = True
    sliding_window: int = 0
    """Rows that a row attends to, itself included; 0: all."""
    trained_tokens: int = 2048
    """The longest text that it was trained on."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        h, taps, inner = self.hidden_size, len(self.layers), self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (self.draft_vocab_size,),
            "fc.weight": (h, taps * self.target_hidden_size),
            "self_attn.q_proj.weight": (q, 2 * h),
            "self_attn.k_proj.weight": (kv, 2 * h),
            "self_attn.v_proj.weight": (kv, 2 * h),
            "self_attn.o_proj.weight": (h, q),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            shapes[f"{name}.weight"] = (h,)
        if self.fc_bias:
            shapes["fc.bias"] = (h,)
        if self.fuse == "joint":
            shapes["input_norm.weight"] = (taps * self.target_hidden_size,)
        if self.fuse == "each":
            each = {f"fc_norm.{tap}.weight": (self.target_hidden_size,) for tap in range(taps)}
            shapes |= each
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, h)
        if self.own_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, h)
        return shapes


def read_shape(folder: Path) -> EagleShape:
    """Return the shape of a converted head. Raises ConfigError naming the file and the field."""
    raw, path = read_model_config(folder), folder / "config.json"
    try:
        values = {name: raw[name] for name in EagleShape.__dataclass_fields__}
        shape = EagleShape(**{**values, "layers": tuple(values["layers"])})
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing") from None
    except TypeError as error:
        raise ConfigError(
            f"{path} is not the config of a converted EAGLE-3 head: {error}"
        ) from error
    if shape.fuse not in FUSES:
        raise ConfigError(f"{path}: fuse must be one of {', '.join(FUSES)}, got {shape.fuse!r}")
    return shape


def load(folder: Path) -> tuple[EagleShape, dict[str, Stored]]:
    """Return the shape of a converted head, and its tensors in their file. Raises ConfigError for
    files that are missing or do not fit.
    """
    from backend.engines.checkpoint import map_file  # it imports NumPy

    shape, path = read_shape(folder), folder / WEIGHTS_FILE
    tensors = map_file(path)
    check_tensors(shape, tensors, str(path))
    return shape, tensors


def save(
    folder: Path, shape: EagleShape, tensors: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> None:
    """Write a converted head of the tensors in the table above (``fc.weight`` [h, n H] and others).
    ``provenance`` goes into ``config.json``: where the head comes from and which target it is for.
    """
    from safetensors.torch import save_file

    check_tensors(shape, tensors, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    raw = {**asdict(shape), "max_position_embeddings": shape.trained_tokens, **provenance}
    raw |= {"layers": list(shape.layers), "architectures": [ARCHITECTURE]}
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def check_tensors(
    shape: EagleShape, tensors: Mapping[str, Stored] | Mapping[str, Tensor], where: str
) -> None:
    """Raise ConfigError unless the tensors, of any shape [...], are exactly those of ``shape`` and
    the token ids are of the vocabulary.
    """
    expected = shape.tensors()
    if unknown := sorted(set(tensors) - set(expected)):
        raise ConfigError(f"{where}: unknown tensors: {', '.join(unknown)}")
    for name, size in expected.items():
        actual = list(tensors[name].shape) if name in tensors else "missing"
        if actual != list(size):
            raise ConfigError(f"{where}: {name} should be {list(size)}, is {actual}")
    ids = tensors["token_ids"].tolist()
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= shape.vocab_size:
        text = f"token_ids must be different ids below {shape.vocab_size}"
        raise ConfigError(f"{where}: {text}")


def activations(engine: EngineConfig) -> str:
    """Return the dtype of a head's activations: int8 rounds the matrices of drafted rows only."""
    if engine.dtype != "int8":
        return engine.dtype
    return "bf16" if machine.multiplies_bf16() else "fp32"


def place_of(published: Path) -> Path:
    """Return where the converted form of a published head lies in the cache, or will lie."""
    files = sorted([*published.glob(SAFETENSORS), *published.glob(PICKLES)])
    config = (published / "config.json").read_text("utf-8")
    parts = [FORMAT, config, sampled_sha256(files)]
    return cache.head_folder(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])


def is_converted(place: Path, target: Path) -> bool:
    """Return whether the cache has all of a converted head for the target in a folder."""
    try:
        cache.check(place)
    except cache.CacheError:
        return False
    return made_for(place) == weights_sha256(target)


def made_for(converted: Path) -> str:
    """Return the hash of the target's weights that a head was converted for (``weights_sha256``);
    empty where its folder does not say.
    """
    return str(read_model_config(converted).get("target_sha256", ""))


def is_ours(folder: Path) -> bool:
    """Return whether a folder has our form already."""
    return ARCHITECTURE in (read_model_config(folder).get("architectures") or ())


def served_folder(folder: Path) -> Path:
    """Return the folder that an engine reads for a head in ``folder``: this one where it has our
    form. Raises NotPreparedError where it is to be converted first.
    """
    if is_ours(folder):
        return folder
    place = place_of(folder)
    if not place.is_dir():
        raise NotPreparedError(f"{folder} is not converted yet: run `spindle prepare`")
    return place
