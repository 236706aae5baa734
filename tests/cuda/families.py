"""Tiny random models of transformers' decoder families."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from backend.engines.cuda.kernels import plain_kernels
from backend.engines.cuda.model import PagedModel
from backend.engines.models.attention import ATTENTION

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24},
    "phi3": {},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo2": {},
    "smollm3": {},
}
ALL_FUSED = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"}


def models(family: str) -> tuple[nn.Module, PagedModel]:
    """Return a tiny model's plain form and its paged one, with the same random weights."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 199,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | FAMILIES[family]
    torch.manual_seed(0)
    made = [
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **config), attn_implementation=kind, dtype=torch.float32
        ).eval()
        for kind in ("eager", ATTENTION)
    ]
    for weight in made[0].parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.15)
        else:
            nn.init.normal_(weight, mean=0.7, std=0.1)
    made[1].load_state_dict(made[0].state_dict())
    paged = PagedModel(made[1], plain_kernels(), blocks=64, row_pages=16)
    return made[0], paged
