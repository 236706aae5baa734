"""Tiny Llamas whose weights are in memory, as transformers' modules and as the reference engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.initialization import no_init_weights

from backend.engines.models.attention import ATTENTION
from backend.engines.models.spec import AttentionSpec, PlainLlama
from backend.engines.torch.engine import TorchEngine


def llama(*sizes: Any, **more: Any) -> PlainLlama:
    """Return the description of a Llama; ``sizes`` are in the order of ``PlainLlama``."""
    usual: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    usual["rope"] = {"rope_type": "default"}
    return PlainLlama(*sizes, **usual | more)


def layers_of(shape: PlainLlama) -> tuple[AttentionSpec, ...]:
    """Return what its layers ask of attention."""
    heads, dim = (shape.num_heads, shape.num_kv_heads), shape.head_dim
    return tuple(
        AttentionSpec(layer, *heads, dim, dim, dim**-0.5) for layer in range(shape.num_layers)
    )


def in_modules(shape: PlainLlama, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return transformers' modules of these weights, in their dtype and on their device."""
    only_qkv = shape.qkv_bias and not shape.output_bias
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, **shape.rope},
        "tie_word_embeddings": shape.ties_embeddings,
        "attn_implementation": ATTENTION,
    }
    settings |= {} if only_qkv else {"attention_bias": shape.qkv_bias}
    with no_init_weights():
        lm: Any = (
            Qwen2ForCausalLM(Qwen2Config(**settings))
            if only_qkv
            else LlamaForCausalLM(LlamaConfig(**settings))
        )
    with torch.inference_mode(False):
        lm.load_state_dict(weights, strict=not shape.ties_embeddings, assign=True)
        lm.tie_weights()
    rotary = lm.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(weights["model.norm.weight"].device)
    return lm.eval().requires_grad_(False)


def with_exact_norms(lm: Any) -> Any:
    """Let norms compute in the weights' dtype; transformers' compute in fp32, also in fp64."""
    for name, module in [*lm.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(len(module.weight), module.variance_epsilon, device="meta")
            norm.weight = module.weight
            lm.set_submodule(name, norm)
    return lm


def copy_of(lm: Any) -> Any:
    """Return modules of the same weights that attend as transformers does by itself."""
    with no_init_weights():
        other = type(lm)(lm.config)
    other.load_state_dict(lm.state_dict(), assign=True)
    other = with_exact_norms(other.eval().requires_grad_(False))
    other.set_attn_implementation("sdpa")
    return other


def torch_engine(
    name: str, shape: PlainLlama, weights: Mapping[str, torch.Tensor], **sizes: Any
) -> TorchEngine:
    """Return the reference engine of these weights."""
    lm = with_exact_norms(in_modules(shape, weights))
    return TorchEngine(name, lm, layers_of(shape), **sizes)
