"""Tiny random folders of transformers' decoder families, and of those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.checkpoints import LLAMA3

BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {"head_dim": 16}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SCALED_YARN = {
    "llama_4_scaling_beta": 0.1,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GRANITE = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": (
        "llama",
        {
            **_WIDE,
            "rope_parameters": {**LLAMA3, "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {**_WIDE, "sliding_window": None}),
    "mistral, windows": ("mistral", {**_WIDE, "sliding_window": 16}),
    "ministral 3": ("ministral3", {**_WIDE, "rope_parameters": _YARN | _SCALED_YARN}),
    "qwen 2": ("qwen2", {}),
    "qwen 3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen 3 moe": (
        "qwen3_moe",
        {
            **_WIDE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {**_WIDE, **_EXPERTS, "sliding_window": None}),
    "gemma 2": (
        "gemma2",
        {
            **_WIDE,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3": ("gemma3_text", {**_WIDE, **_WINDOWS, "query_pre_attn_scalar": 32}),
    "gemma 4": (
        "gemma4_text",
        {
            **_WIDE,
            **_WINDOWS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 2,
        },
    ),
    "phi 4": ("phi3", {"rope_parameters": _PARTIAL, "sliding_window": None}),
    "smollm 3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("granite", _GRANITE),
    "granite moe": ("granitemoe", {**_EXPERTS, **_GRANITE}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo3", _WINDOWS),
    "glm 4": ("glm4", {**_WIDE, "rope_parameters": _PARTIAL}),
    "glm 4 moe": (
        "glm4_moe",
        {
            **_WIDE,
            "rope_parameters": _PARTIAL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "olmoe": ("olmoe", {**_EXPERTS, "clip_qkv": 1.0}),
    "gpt-oss": ("gpt_oss", {**_WIDE, **_EXPERTS, **_WINDOWS, "rope_parameters": _YARN}),
    "cohere 2": ("cohere2", {**_WIDE, **_WINDOWS}),
    "exaone 4": ("exaone4", {**_WIDE, "sliding_window": 16, "sliding_window_pattern": 4}),
    "ernie 4.5": ("ernie4_5", _WIDE),
    "hunyuan": ("hunyuan_v1_dense", _WIDE),
}
"""Model types of transformers and settings besides ``BASE``."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen 3.5": ("qwen3_5_text", {**_WIDE, **_LINEAR}, r"layer 0 \(linear_attention\) keeps"),
    "qwen 3 next": (
        "qwen3_next",
        {
            **_WIDE,
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        r"layer 0 \(linear_attention\) keeps a state that is not KV",
    ),
    "lfm 2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, r"layer 0 \(conv\) keeps"),
    "granite hybrid": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
        r"layer 0 \(linear_attention\) keeps a state that is not KV",
    ),
    "falcon h1": ("falcon_h1", {}, "a convolution keeps a state that is not KV"),
    "llama 4": (
        "llama4_text",
        {
            **_WIDE,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 1, 0],
        },
        "chunked attention",
    ),
    "deepseek v3": ("deepseek_v3", _MLA, "MLA, whose latent does not fit our KV pool"),
    "deepseek v4": (
        "deepseek_v4",
        _WIDE,
        r"\(heavily_compressed_attention\) attend to tokens in comp",
    ),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type 'dynamic'",
    ),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}, "layer 0 keeps a state|logits_to_keep"),
    "bert": ("bert", {}, "attends to later tokens|as a language model"),
}
"""The same with the reason."""


def config_of(model_type: str, settings: dict[str, Any]) -> Any:
    """Return a configuration of transformers."""
    return AutoConfig.for_model(model_type, **BASE | settings)


def make_model(
    family: str, implementation: str = "eager", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a random model of a family in transformers' own form."""
    config = config_of(*SERVED[family])
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=dtype
    )
    spread_weights(lm)
    model: nn.Module = lm.eval()
    return model


def spread_weights(lm: nn.Module) -> None:
    """Give a model random weights that make all of its parts matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                scale = 0.5 if "embed" in name else 0.6 / weight.shape[-1] ** 0.5
                weight.copy_(noise * scale)
            else:
                weight.add_(noise * (0.1 if "norm" in name else 0.3))


def make_folder(family: str, folder: Path) -> Path:
    """Save a random model of a family."""
    model: Any = make_model(family)
    model.save_pretrained(folder)
    return folder
