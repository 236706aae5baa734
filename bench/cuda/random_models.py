"""Llamas of random weights, in the shape of an 8B and, for rehearsals, tiny."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backend.engines.models.attention import ATTENTION


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a Llama-shaped decoder."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    ties_embeddings: bool = False


SHAPES = {
    "8b": DecoderShape(32, 4096, 14336, 32, 8, 128, 128256),
    "tiny": DecoderShape(2, 64, 128, 4, 2, 32, 512),
}


def random_llama(shape: DecoderShape, device: str, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Return transformers' Llama of a shape with random weights."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        initializer_range=shape.hidden**-0.5,
        tie_word_embeddings=shape.ties_embeddings,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=dtype
        ).eval()
