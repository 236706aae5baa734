"""Published EAGLE-3 heads in their three dialects: SafeAILab's, the flat ``config.json`` of
ModelOpt, SpecForge and AngelSlim, and speculators'. A head that cannot be served is refused by
field and value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.checked_settings import ConfigError
from backend.engines.checkpoint import CheckpointError, read_rope
from backend.engines.eagle.folder import EagleShape
from backend.engines.eagle.published import model_type, other_kind, read_tensors
from backend.engines.models.rope import ROPE_TYPES
from backend.published_heads import SAFETENSORS
from backend.storage.manifest import read_model_config

DEFAULT_THETA = 10000.0
"""Base of the rotary embedding where a folder says none: the default of its readers, never the
target's.
"""

_RENAMES = (
    (r"^(module|draft_model|eagle_module)\.", ""),
    (r"^model\.", ""),
    (r"^(midlayer|layers\.0)\.", ""),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
"""Maps a dialect's names of tensors to those of ``folder``, one after the other."""

_UNUSED = re.compile(r"(^|\.)(verifier_|rotary_emb\.)")
"""Tensors that training or other readers need."""

MOST_PADDING = 1024
"""Rows by which two models of one tokenizer differ at most, as Qwen2.5's of 3B and 7B by 128."""

_LISTED = 40
"""Names that a refusal lists at most, of a dialect that is not known."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Properties of its target that a head must fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    tokens: int = 0
    """Ids that its tokenizer has; its vocabulary may be padded beyond them."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A published head in the names of ``folder``."""

    shape: EagleShape
    tensors: dict[str, Tensor]  # of any shape, such as [rows, columns]
    dialect: str
    states_layers: bool
    """Whether ``config.json`` names the layers that it reads."""
    states_residual: bool
    """Whether it says which state the residual is."""


class _Folder:
    """The settings of a published folder, with refusals that name it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.raw = read_model_config(folder)
        self.inner: dict[str, Any] = self.raw.get("eagle_config") or {}
        self.is_speculators = model_type(self.raw) == "eagle3"
        layer = self.raw.get("transformer_layer_config") if self.is_speculators else self.raw
        self.layer: dict[str, Any] = layer or {}

    def refuse(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path} cannot be served: {reason}")

    def setting(self, name: str) -> Any:
        """Return what ``eagle_config``, the top level or the layer says; None: nothing."""
        places = (self.inner, self.raw, self.layer)
        return next((one[name] for one in places if one.get(name) is not None), None)

    def number(self, name: str, default: int | None = None) -> int:
        value = self.layer.get(name)
        value = self.raw.get(name) if value is None else value
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise self.refuse(f"{name} in config.json must be a positive number, got {value!r}")
        return value

    @property
    def dialect(self) -> str:
        if self.is_speculators:
            return "speculators"
        return "flat" if any(self.path.glob(SAFETENSORS)) else "SafeAILab"


def read_published(folder: Path, target: TargetShape) -> PublishedHead:
    """Return a published head for this target. Raises ConfigError naming the folder, the field and
    the value for one that is not served.
    """
    source, published = _Folder(folder), read_tensors(folder)
    _check_kind(source, published)
    tensors = _rename(source, published)
    fc, q, k = (
        tensors[n] for n in ("fc.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight")
    )
    hidden, read = fc.shape[0], source.raw.get("target_hidden_size") or target.hidden_size
    _check_fit(source, tensors, target, read)
    heads = source.number("num_attention_heads")
    head_dim = source.number("head_dim", q.shape[0] // heads)
    draft_vocab = _fit_rows(source, tensors, target)
    residual = source.setting("norm_before_residual")
    shape = EagleShape(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        target_hidden_size=read,
        intermediate_size=source.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=source.number("num_key_value_heads", k.shape[0] // head_dim),
        head_dim=head_dim,
        layers=_layers(source, fc.shape[1] // read, target.num_layers),
        rms_norm_eps=float(source.layer.get("rms_norm_eps") or 1e-6),
        **_rope(source),
        fuse=_fuse(source, tensors),
        fc_bias="fc.bias" in tensors,
        norm_before_residual=source.is_speculators if residual is None else bool(residual),
        norm_output=bool(source.setting("norm_output")),
        qk_norm="self_attn.q_norm.weight" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        sliding_window=_window(source),
        trained_tokens=source.number("max_position_embeddings", 2048),
    )
    _check_tensors(source, shape, tensors)
    return PublishedHead(
        shape, tensors, source.dialect, _stated_layers(source) is not None, residual is not None
    )


def _check_kind(source: _Folder, published: Mapping[str, Tensor]) -> None:
    """Refuse what is not one layer of EAGLE-3 on several of the target's layers; of the tensors,
    of any shape [...], it reads the names.
    """
    if what := other_kind(source.raw, published):
        raise source.refuse(f"it is {what}")
    ends = tuple(f"{name}.weight" for name in ("fc", "hidden_norm", "q_proj", "k_proj"))
    if not all(any(name.endswith(end) for name in published) for end in ends):
        names = sorted(published)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise source.refuse(
            "it is in an unknown EAGLE-3 format. Please report these lines. config.json "
            f"has {', '.join(sorted(source.raw))}; tensors are {', '.join(names[:_LISTED])}{more}"
        )
    layers = source.number("num_hidden_layers", 1)
    if layers > 1 or any(re.search(r"(^|\.)layers\.[1-9]", name) for name in published):
        raise source.refuse(f"it has several layers (num_hidden_layers {layers}); one is served")
    if source.setting("use_aux_hidden_state") is False:
        raise source.refuse("use_aux_hidden_state is false: it reads the target's last layer only")
    if (activation := source.layer.get("hidden_act") or "silu") != "silu":
        raise source.refuse(f"hidden_act is {activation!r}, only 'silu' is supported")


def _rename(source: _Folder, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, each of any shape [...], by the names of ``folder``."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in published.items():
        new = name
        for pattern, replacement in _RENAMES:
            new = re.sub(pattern, replacement, new)
        if new in tensors:
            raise source.refuse(f"two of its tensors are {new}; the second is {name}")
        if not _UNUSED.search(name):
            tensors[new] = tensor
    for name in ("fc.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        if name not in tensors:
            raise source.refuse(f"{name} is missing; tensors are {', '.join(sorted(published))}")
    return tensors


def _check_fit(
    source: _Folder, tensors: Mapping[str, Tensor], target: TargetShape, read: int
) -> None:
    """Refuse a head for a target of another width, and one whose layer is not EAGLE-3's, which has
    ``fc.weight`` [hidden, layers x read] and ``self_attn.q_proj.weight`` [n, 2 hidden].
    """
    (hidden, wide), q = tensors["fc.weight"].shape, tensors["self_attn.q_proj.weight"]
    if read != target.hidden_size:
        raise source.refuse(f"target_hidden_size is {read}, its target's {target.hidden_size}")
    if q.shape[1] != 2 * hidden:
        text = f"self_attn.q_proj.weight reads {q.shape[1]} numbers"
        raise source.refuse(f"{text}; an EAGLE-3 head of width {hidden} reads {2 * hidden}")
    if wide % read:
        text = f"fc.weight reads {wide} numbers, no multiple of its target's hidden_size {read}"
        raise source.refuse(text)


def _fit_rows(source: _Folder, tensors: dict[str, Tensor], target: TargetShape) -> int:
    """Give a head as many rows as the target has, whose vocabulary may be padded otherwise; return
    how many tokens it proposes. Refuse one of another vocabulary.

    In ``tensors``, it cuts ``lm_head.weight`` [rows, hidden], cuts or pads ``embed_tokens.weight``
    [vocab, hidden], where a head has them, and adds ``token_ids`` int64[n].
    """
    vocab = source.number("vocab_size", target.vocab_size)
    least = min(vocab, target.vocab_size)
    if abs(vocab - target.vocab_size) > MOST_PADDING or least < target.tokens:
        raise source.refuse(f"vocab_size is {vocab}, its target's {target.vocab_size}")
    rows = source.number("draft_vocab_size", vocab)
    ids = _token_ids(source, tensors, rows, vocab)
    _check_shared(source, tensors, target, shares_rows=rows == vocab)
    is_known, head = ids < target.vocab_size, tensors.get("lm_head.weight")
    if head is not None and len(head) == len(ids):
        tensors["lm_head.weight"] = head[is_known]
    tensors["token_ids"] = ids[is_known]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and len(embedding) == vocab:
        padding = embedding.new_zeros(target.vocab_size - least, embedding.shape[1])
        tensors["embed_tokens.weight"] = torch.cat([embedding[:least], padding])
    return len(tensors["token_ids"])


def _check_shared(
    source: _Folder, tensors: Mapping[str, Tensor], target: TargetShape, *, shares_rows: bool
) -> None:
    """Refuse a head without a matrix for which the target's cannot stand in: one as wide as
    ``fc.weight`` [hidden, layers x read] has rows.
    """
    hidden = tensors["fc.weight"].shape[0]
    for name in ("lm_head.weight", "embed_tokens.weight"):
        if name not in tensors and hidden != target.hidden_size:
            wide = f"the target's is {target.hidden_size} wide, not {hidden}"
            raise source.refuse(f"{name} is missing, and {wide}")
    if "lm_head.weight" not in tensors and not shares_rows:
        text = f"draft_vocab_size {source.number('draft_vocab_size')} is not the target's"
        raise source.refuse(f"lm_head.weight is missing, and {text} {target.vocab_size}")


def _stated_layers(source: _Folder) -> list[int] | None:
    ids = source.setting("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        text = f"eagle_aux_hidden_state_layer_ids must be a list of numbers, got {ids!r}"
        raise source.refuse(text)
    return ids


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers, counted from 1, that a head reads which names none."""
    return (2, layers // 2, layers - 3)


def _layers(source: _Folder, taps: int, layers: int) -> tuple[int, ...]:
    """Return the layers that a folder names, counted from 1, by the likelier of two conventions:
    under one key, some folders count layers' outputs from 0, others the boundaries between layers
    (``conversion`` measures which it is).
    """
    ids = _stated_layers(source)
    if ids is None:
        if taps != 3:
            raise source.refuse(f"fc.weight reads {taps} layers, and config.json names none")
        return _checked_layers(source, default_layers(layers), taps, layers)
    nested = "eagle_aux_hidden_state_layer_ids" in source.inner
    counts_from_0 = 0 in ids or (nested and ids[0] == 1 and max(ids) < layers)
    numbers = tuple(layer + 1 for layer in ids) if counts_from_0 else tuple(ids)
    return _checked_layers(source, numbers, taps, layers)


def _checked_layers(
    source: _Folder, numbers: tuple[int, ...], taps: int, layers: int
) -> tuple[int, ...]:
    if len(numbers) != taps or not all(1 <= layer <= layers for layer in numbers):
        raise source.refuse(
            f"it reads the layers {list(numbers)}; fc.weight is for {taps} layers, of a target of "
            f"{layers}"
        )
    return numbers


def _rope(source: _Folder) -> dict[str, Any]:
    """Return ``rope`` and ``rope_theta`` of ``EagleShape``."""
    by_layer = source.layer.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in by_layer.values()):
        raise source.refuse(f"rope_parameters differ by type of layer: {', '.join(by_layer)}")
    try:
        rope = read_rope(source.layer, str(source.path / "config.json"))
    except CheckpointError as error:
        raise source.refuse(str(error)) from error
    theta = rope.pop("rope_theta", None) or source.layer.get("rope_theta") or DEFAULT_THETA
    if rope["rope_type"] not in ROPE_TYPES:
        types = ", ".join(ROPE_TYPES)
        raise source.refuse(f"rope_type is {rope['rope_type']!r}; known are {types}")
    part = rope.get("partial_rotary_factor") or source.layer.get("partial_rotary_factor") or 1
    if part != 1:
        raise source.refuse(f"partial_rotary_factor is {part}, only 1 is supported")
    return {"rope": rope, "rope_theta": float(theta)}


def _fuse(source: _Folder, tensors: Mapping[str, Tensor]) -> str:
    """Return what is normed before ``fc``: flags and names of tensors [...] must agree."""
    there = {
        "joint": "input_norm.weight" in tensors,
        "each": any(name.startswith("fc_norm.") for name in tensors),
    }
    flags = {"joint": ("norm_before_fc",), "each": ("fc_norm", "use_aux_norm")}
    if all(there.values()):
        raise source.refuse("it has both input_norm.weight and fc_norm, which exclude each other")
    for fuse, names in flags.items():
        stated = {name: source.setting(name) for name in names if source.setting(name) is not None}
        wanted = any(stated.values())
        if stated and wanted != there[fuse]:
            is_there = "there" if there[fuse] else "missing"
            text = ", ".join(f"{name} is {value!r}" for name, value in stated.items())
            raise source.refuse(f"{text}, and the tensors for it are {is_there}")
    return next((fuse for fuse, is_there in there.items() if is_there), "plain")


def _window(source: _Folder) -> int:
    sliding = "sliding_attention" in (source.layer.get("layer_types") or ())[:1]
    return int(source.layer.get("sliding_window") or 0) if sliding else 0


def _token_ids(source: _Folder, tensors: dict[str, Tensor], rows: int, vocab: int) -> Tensor:
    """Return the target's token of every row, int64[rows], and take the maps away: ``d2t`` [rows]
    holds differences to the number of the row, ``t2d`` [vocab] says which tokens have one.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if rows != vocab:
            text = f"d2t is missing: draft_vocab_size {rows} of {vocab} tokens"
            raise source.refuse(text)
        return torch.arange(vocab)
    if len(d2t) != rows:
        raise source.refuse(f"d2t has {len(d2t)} rows, draft_vocab_size is {rows}")
    ids = d2t.long() + torch.arange(rows)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        text = f"d2t reaches from {int(ids.min())} to {int(ids.max())}"
        raise source.refuse(f"{text}, of a vocabulary of {vocab} tokens: made for another one?")
    if len(ids.unique()) != rows:
        raise source.refuse(f"d2t names only {len(ids.unique())} different tokens in {rows} rows")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise source.refuse(f"t2d has {int(t2d.bool().sum())} tokens, which are not those of d2t")
    return ids


def _check_tensors(source: _Folder, shape: EagleShape, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors [...] of other names or shapes than those of ``shape``."""
    expected = shape.tensors()
    if unknown := sorted(set(tensors) - set(expected)):
        raise source.refuse(f"unknown tensors {', '.join(unknown[:_LISTED])}")
    for name, size in expected.items():
        actual = list(tensors[name].shape) if name in tensors else "missing"
        if actual != list(size):
            raise source.refuse(f"{name} should be {list(size)} by config.json, is {actual}")
