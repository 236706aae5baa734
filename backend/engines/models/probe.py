"""Each layer's requirements of attention in a decoder, from ``config.json`` alone: a pass of its
modules on the meta device, which has shapes but no numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import ATTENTION, attending_by
from backend.engines.models.configuration import read_decoder_config, refuse
from backend.engines.models.rope import ROPE_TYPES
from backend.engines.models.spec import AttentionSpec, DecoderSpec, PlainLlama

_ROWS, _WANTED = 5, 2
"""Tokens of the pass on the meta device, and rows of them whose logits are asked for."""

_LLAMAS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Architectures that are a Llama and nothing more, with the settings that ``_plain`` looks at."""

_ROPE_SETTINGS = {
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_type",
}
"""Settings of a rotary embedding that ``models.rope`` computes."""


def probe(folder: Path) -> DecoderSpec:
    """Return what a folder's decoder asks. Raises CheckpointError with the reason for one that is
    not served.
    """
    config = read_decoder_config(folder)
    architecture = str((config.architectures or ["none"])[0])
    try:
        lm, layers = _run(config)
    except Exception as error:
        refuse(folder, architecture, str(error) or type(error).__name__)
    for reason in _reasons(lm, config, layers):
        refuse(folder, architecture, reason)
    ties_embeddings = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    return DecoderSpec(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        max_context_tokens=int(getattr(config, "max_position_embeddings", 0) or 0),
        layers=tuple(layers),
        weights=sum(weight.numel() for weight in lm.parameters()),
        looked_up=sum(m.weight.numel() for m in lm.modules() if isinstance(m, nn.Embedding)),
        experts=sum(weight.numel() for weight in lm.parameters() if weight.dim() == 3),
        ties_embeddings=ties_embeddings,
        row_width=_row_width(lm, config, layers),
        llama=_plain(lm, config, layers, ties_embeddings=ties_embeddings),
    )


def check_taps(folder: Path, spec: DecoderSpec, taps: Sequence[int]) -> None:
    """Raise CheckpointError for a layer of ``taps``, counted from 1, that a decoder lacks."""
    if taps and max(taps) > len(spec.layers):
        text = f"has {len(spec.layers)} layers, and a draft reads layer {max(taps)}"
        raise CheckpointError(f"{folder} {text}")


def _run(config: PretrainedConfig) -> tuple[Any, list[AttentionSpec]]:
    """Return a model without numbers and what its layers asked, in the order of their calls."""
    layers: list[AttentionSpec] = []

    def attend(
        spec: AttentionSpec,
        query: torch.Tensor,  # [1, heads, rows, key_dim]
        key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
        value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
        sinks: torch.Tensor | None,  # [heads]
    ) -> torch.Tensor:
        del key, value, sinks
        layers.append(spec)
        return query.new_zeros(1, query.shape[2], spec.heads, spec.value_dim)

    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            experts_implementation="batched_mm",  # the other forms look at numbers
        ).eval()
        ids = torch.zeros(1, _ROWS, dtype=torch.int64)
        wanted = torch.zeros(_WANTED, dtype=torch.int64)
    if "logits_to_keep" not in inspect.signature(lm.forward).parameters:
        raise ValueError("it cannot leave out logits (logits_to_keep)")
    with attending_by(attend), torch.inference_mode():
        lm(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=wanted)
    return lm, layers


def _reasons(lm: Any, config: PretrainedConfig, layers: Sequence[AttentionSpec]) -> Iterator[str]:
    """Yield why a decoder is not served, by what its layers did and did not ask."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    order = [spec.layer for spec in layers]
    silent = [layer for layer in range(config.num_hidden_layers) if layer not in order]
    if silent:
        kind = f" ({kinds[silent[0]]})" if len(kinds) > silent[0] else ""
        yield f"layer {silent[0]}{kind} keeps a state that is not KV"
    if order != sorted({*order}):
        yield f"its layers attend in the order {order}"
    if any(isinstance(module, nn.Conv1d) for module in lm.modules()):
        yield "a convolution keeps a state that is not KV"
    for spec in layers:
        if spec.heads % spec.kv_heads:
            yield f"its {spec.heads} heads are no multiple of its {spec.kv_heads} of keys"
        kind = kinds[spec.layer] if len(kinds) > spec.layer else ""
        if kind == "sliding_attention" and not spec.window:
            layer = f"the sliding window of layer {spec.layer}"
            yield f"{layer} is not passed on to the attention function"
    windowed = getattr(config, "sliding_window", None)
    if windowed and not kinds and not any(spec.window for spec in layers):
        yield f"sliding_window {windowed} is not passed on to the attention function"


def _row_width(lm: Any, config: PretrainedConfig, layers: Sequence[AttentionSpec]) -> int:
    """Return the numbers that a token's widest layer makes of it, estimated from shapes."""
    attention = max(
        2 * (s.heads * (s.key_dim + s.value_dim) + s.kv_heads * (s.key_dim + s.value_dim))
        for s in layers
    )
    head = lm.get_output_embeddings()
    units = max(
        max(m.in_features, m.out_features)
        for m in lm.modules()
        if isinstance(m, nn.Linear) and m is not head
    )
    experts = getattr(config, "num_experts_per_tok", None) or 1
    routed = experts * int(getattr(config, "moe_intermediate_size", None) or units)
    return int(4 * config.hidden_size + attention + 3 * max(units, routed))


def _plain(
    lm: Any, config: PretrainedConfig, layers: Sequence[AttentionSpec], *, ties_embeddings: bool
) -> PlainLlama | None:
    """Return a decoder as a Llama; None for one that is more than that."""
    settings: Any = config
    if type(lm).__name__ not in _LLAMAS or any(spec.window for spec in layers):
        return None
    rope = {k: value for k, value in settings.rope_parameters.items() if k != "type"}
    if rope["rope_type"] not in ROPE_TYPES or not rope.keys() <= _ROPE_SETTINGS:
        return None
    if settings.hidden_act != "silu" or getattr(settings, "mlp_bias", False):
        return None
    attention, first = lm.get_decoder().layers[0].self_attn, layers[0]
    return PlainLlama(
        vocab_size=int(settings.vocab_size),
        hidden_size=int(settings.hidden_size),
        intermediate_size=int(settings.intermediate_size),
        num_layers=len(layers),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.key_dim,
        rms_norm_eps=float(settings.rms_norm_eps),
        rope_theta=float(rope["rope_theta"]),
        rope=rope,
        ties_embeddings=ties_embeddings,
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
    )
