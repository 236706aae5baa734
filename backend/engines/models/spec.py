"""The one description of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's requirements of attention."""

    layer: int
    heads: int
    kv_heads: int
    key_dim: int
    """Columns of a head's query and key."""
    value_dim: int
    """Columns of a head's value and output."""
    scale: float
    window: int = 0
    """Tokens that a query sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound of the scores, by tanh; 0: none."""
    sinks: bool = False
    """Whether each head has a learned score that takes part in softmax without a value."""


@dataclass(frozen=True, slots=True)
class PlainLlama:
    """A decoder that is a Llama and nothing more, for the forwards that we build of its weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope: Mapping[str, Any]
    """``rope_type`` and its parameters, in the names of transformers' ``rope_parameters``."""
    ties_embeddings: bool = False
    """Whether the head is the matrix of embeddings."""
    qkv_bias: bool = False
    output_bias: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of such a model, by its Hugging Face name."""
        hidden, units = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.ties_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            at = f"model.layers.{index}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            for name, width in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{at}self_attn.{name}.weight"] = (width, hidden)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{name}.bias"] = (width,)
            shapes[at + "self_attn.o_proj.weight"] = (hidden, query)
            if self.output_bias:
                shapes[at + "self_attn.o_proj.bias"] = (hidden,)
            shapes[at + "mlp.gate_proj.weight"] = (units, hidden)
            shapes[at + "mlp.up_proj.weight"] = (units, hidden)
            shapes[at + "mlp.down_proj.weight"] = (hidden, units)
        return shapes


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Facts about a decoder that are known before its weights are read."""

    architecture: str
    """The class that transformers builds."""
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    """The longest text that it was trained on; 0: its configuration does not say."""
    layers: tuple[AttentionSpec, ...]
    weights: int
    """Numbers in all matrices together, each counted once."""
    looked_up: int
    """Numbers in the matrices of embeddings."""
    experts: int
    """Numbers in the matrices of experts."""
    ties_embeddings: bool
    """Whether the head is a matrix of embeddings."""
    row_width: int
    """Numbers that the widest layer makes of a token."""
    llama: PlainLlama | None = None
    """The same as a Llama; None for a decoder that is more than that."""

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in all layers together."""
        return sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in self.layers)
