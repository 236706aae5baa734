"""Each layer's requirements of attention in a decoder, from ``config.json`` alone: a pass of its
modules on the meta device, which has shapes but no numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import ATTENTION, AttentionSpec, attending_by
from backend.engines.models.configuration import read_decoder_config, refuse

_ROWS, _WANTED = 5, 2
"""Tokens of the pass on the meta device, and rows of them whose logits are asked for."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Facts about a decoder that are known before its weights are read."""

    architecture: str
    """The class that transformers builds."""
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    layers: tuple[AttentionSpec, ...]
    weights: int
    """Numbers in all matrices together, each counted once."""
    looked_up: int
    """Numbers in the matrices of embeddings."""
    experts: int
    """Numbers in the matrices of experts."""
    tied: bool
    """Whether the head is a matrix of embeddings."""
    row_width: int
    """Numbers that the widest layer makes of a token."""

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in all layers together."""
        return sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in self.layers)


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
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    return DecoderSpec(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        max_context_tokens=int(getattr(config, "max_position_embeddings", 0) or 0),
        layers=tuple(layers),
        weights=sum(weight.numel() for weight in lm.parameters()),
        looked_up=sum(m.weight.numel() for m in lm.modules() if isinstance(m, nn.Embedding)),
        experts=sum(weight.numel() for weight in lm.parameters() if weight.dim() == 3),
        tied=head.weight is embeddings.weight,
        row_width=_row_width(lm, config, layers),
    )


def check_taps(folder: Path, spec: DecoderSpec, taps: Sequence[int]) -> None:
    """Raise CheckpointError for a layer of ``taps``, counted from 1, that a decoder lacks."""
    if taps and max(taps) > len(spec.layers):
        text = f"a draft reads layer {max(taps)} of it, and it has {len(spec.layers)}"
        raise CheckpointError(f"{folder}: {text}")


def _run(config: PretrainedConfig) -> tuple[Any, list[AttentionSpec]]:
    """Return a model without numbers and what its layers asked, in the order of their calls."""
    layers: list[AttentionSpec] = []

    def attend(
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
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
    asked = [spec.layer for spec in layers]
    silent = [layer for layer in range(config.num_hidden_layers) if layer not in asked]
    if silent:
        kind = f" ({kinds[silent[0]]})" if len(kinds) > silent[0] else ""
        yield f"layer {silent[0]}{kind} keeps a state that is not KV"
    if asked != sorted({*asked}):
        yield f"its layers attend in the order {asked}"
    if any(isinstance(module, nn.Conv1d) for module in lm.modules()):
        yield "a convolution keeps a state that is not KV"
    for spec in layers:
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
