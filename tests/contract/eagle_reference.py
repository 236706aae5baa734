"""An EAGLE-3 head by another way: transformers' attention, rotary embedding and norms over whole
texts, from the first row on for every path, and nothing stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from backend.engines.eagle.folder import EagleShape

Path = tuple[int, ...]


class EagleReference(nn.Module):
    """A head whose rows have positions from 0 on, as in the published code."""

    input_layernorm: nn.Module
    hidden_norm: nn.Module
    post_attention_layernorm: nn.Module
    norm: nn.Module

    def __init__(
        self, shape: EagleShape, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden_size
        kinds: Any = (Qwen3Config, Qwen3Attention), (LlamaConfig, LlamaAttention)
        kind, attention = kinds[0] if shape.qk_norm else kinds[1]
        config = kind(
            hidden_size=hidden,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_norm_eps,
            max_position_embeddings=4096,
            rope_parameters={**shape.rope, "rope_theta": shape.rope_theta},
            mlp_bias=False,
            attn_implementation="eager",
        )
        self.self_attn, self.mlp = attention(config, 0), LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)
        for name, heads in (
            ("q", shape.num_heads),
            ("k", shape.num_kv_heads),
            ("v", shape.num_kv_heads),
        ):
            wide = nn.Linear(2 * hidden, heads * shape.head_dim, bias=False)
            setattr(self.self_attn, f"{name}_proj", wide)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            setattr(self, name, LlamaRMSNorm(hidden, eps=shape.rms_norm_eps))
        taps, theirs = len(shape.layers), shape.target_hidden_size
        self.fc = nn.Linear(taps * theirs, hidden, bias=shape.fc_bias)
        if shape.fuse == "joint":
            self.input_norm = LlamaRMSNorm(taps * theirs, eps=shape.rms_norm_eps)
        if shape.fuse == "each":
            norms = [LlamaRMSNorm(theirs, eps=shape.rms_norm_eps) for _ in range(taps)]
            self.fc_norm = nn.ModuleList(norms)
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.ids = tensors["token_ids"]
        self.head = tensors.get("lm_head.weight", head[self.ids])
        others = ("embed_tokens.weight", "lm_head.weight", "token_ids")
        own = {name: t for name, t in tensors.items() if name not in others}
        self.load_state_dict(own, strict=False)

    def fuse(self, states: Tensor) -> Tensor:
        """Return f [n, hidden] of states [n, layers, target_hidden]."""
        parts = list(states.unbind(1))
        if self.shape.fuse == "each":
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        joined = torch.cat(parts, -1)
        if self.shape.fuse == "joint":
            joined = self.input_norm(joined)
        return self.fc(joined)

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run all rows [n] of a text; return logits, and what children go on from."""
        count = len(tokens)
        embedded, residual = self.input_layernorm(self.embedding[tokens]), hidden
        normed = self.hidden_norm(hidden)
        if self.shape.norm_before_residual:
            residual = normed
        read = torch.cat([embedded, normed], -1)[None]
        cos, sin = self.rotary(read, torch.arange(count)[None])
        hidden_keys = torch.full((count, count), -torch.inf, dtype=read.dtype)
        mask = hidden_keys.triu(1)
        if self.shape.sliding_window:
            mask = mask + hidden_keys.tril(-self.shape.sliding_window)
        attended = self.self_attn(read, (cos.to(read), sin.to(read)), mask[None, None])[0][0]
        out = residual + attended
        out = out + self.mlp(self.post_attention_layernorm(out))
        vectors = self.norm(out)
        return vectors @ self.head.T, vectors if self.shape.norm_output else out

    @torch.inference_mode()
    def tree(
        self, tokens: list[int], states: Tensor, width: int, depth: int, children: int
    ) -> dict[Path, float]:
        """Return the log-probability of every node by its path: ``children`` of every path that
        goes on, which are the ``width`` likeliest. ``states`` are of all tokens but the last.
        """
        fused, found = self.fuse(states), dict[Path, float]()
        frontier: list[tuple[Path, list[Tensor], float]] = [((), [], 0.0)]
        for _ in range(depth):
            grown = []
            for path, own, score in frontier:
                ids = torch.tensor([*tokens[1:], *path])
                logits, carried = self(ids, torch.cat([fused, *(one[None] for one in own)]))
                best = logits[-1].log_softmax(-1).topk(children)
                for value, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    node = (*path, int(self.ids[column]))
                    grown.append((node, [*own, carried[-1]], score + value))
            found |= {path: score for path, _, score in grown}
            frontier = sorted(grown, key=lambda one: -one[2])[:width]
        return found
