"""A target and an EAGLE-3 head of known texts: the target counts, and the head knows most numbers.

Token t is a point on circles, one for each frequency, and turning all of them by one step leads to
t + 1. The target's layers add nothing, so its state at t is t's point, and it always writes t + 1.
The head reads that state. Its layer turns what it reads by one step: from the state at the token
before to the next token, and from its own state onwards. So it proposes the count if states are
those of the token before, are given back to the next row, and rows stand for the right tokens. It
has no row for the tokens ``UNKNOWN``, where its count ends.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from backend.engines.eagle.folder import EagleShape, save
from backend.storage.manifest import vocabulary_sha256, weights_sha256

VOCAB, HIDDEN, HEADS, INNER = 256, 64, 4, 64
LAYERS = 32
"""Enough layers that a pass of the target takes longer than one of the head."""
UNKNOWN = (7, 20, 33, 34, 50, 71, 150, 153, 201)
SHARPNESS = 8.0
"""Sharpness of logits: the likeliest token has nearly all of the mass."""


def points() -> Tensor:
    """Return the point [vocab, hidden] of each token; its last number is 1."""
    waves = torch.arange(1, HIDDEN // 2)
    angles = 2 * math.pi * torch.outer(torch.arange(VOCAB), waves) / VOCAB
    ends = torch.tensor([[0.0, 1.0]]).expand(VOCAB, 2)
    return torch.cat([angles.cos(), angles.sin(), ends], 1)


def turn() -> Tensor:
    """Return the matrix that leads from each token's point to the next one's."""
    waves = HIDDEN // 2 - 1
    angles = 2 * math.pi * torch.arange(1, waves + 1) / VOCAB
    matrix, rows = torch.eye(HIDDEN), torch.arange(waves)
    matrix[rows, rows] = matrix[rows + waves, rows + waves] = angles.cos()
    matrix[rows + waves, rows], matrix[rows, rows + waves] = angles.sin(), -angles.sin()
    return matrix


def write_target(folder: Path) -> Path:
    """Write the target; its tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER)
    config.num_hidden_layers, config.num_attention_heads = LAYERS, HEADS
    config.num_key_value_heads, config.head_dim = HEADS, HIDDEN // HEADS
    config.max_position_embeddings, config.tie_word_embeddings = 1024, False
    config.architectures, config.bos_token_id, config.eos_token_id = ["LlamaForCausalLM"], 0, 0
    config.save_pretrained(folder)
    generator, one = torch.Generator().manual_seed(0), torch.ones(HIDDEN)
    weights = {
        "model.embed_tokens.weight": points(),
        "model.norm.weight": one,
        "lm_head.weight": SHARPNESS * points().roll(1, 0) / HIDDEN**0.5,
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            random = torch.randn(HIDDEN, HIDDEN, generator=generator)
            weights[f"{at}{name}_proj.weight"] = random / HIDDEN**0.5
        for name in ("self_attn.o", "mlp.down"):
            weights[f"{at}{name}_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        for name in ("input", "post_attention"):
            weights[f"{at}{name}_layernorm.weight"] = one
    save_file({n: t.clone().contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    return folder


def write_head(folder: Path, target: Path) -> Path:
    """Write the head of the target in a folder."""
    ids = torch.tensor([token for token in range(VOCAB) if token not in UNKNOWN])
    shape = EagleShape(
        vocab_size=VOCAB,
        draft_vocab_size=len(ids),
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        layers=(2, LAYERS // 2, LAYERS - 3),
        rms_norm_eps=1e-6,
    )
    size = float(points()[0].pow(2).mean().sqrt())  # every token's
    gate = 4.0 / size  # of the last column, where every point has 1
    generator, one = torch.Generator().manual_seed(1), torch.ones(HIDDEN)
    tensors = {name: torch.zeros(wanted) for name, wanted in shape.tensors().items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = one.clone()
    for name in "qkv":
        weight = tensors[f"self_attn.{name}_proj.weight"]
        weight.copy_(torch.randn(weight.shape, generator=generator) / HIDDEN**0.5)
    tensors["token_ids"] = ids
    tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    tensors["mlp.gate_proj.weight"][:, -1] = 4.0
    tensors["mlp.up_proj.weight"] = torch.eye(HIDDEN)
    silu = gate / (1 + math.exp(-gate))
    tensors["mlp.down_proj.weight"] = (turn() - torch.eye(HIDDEN)) * size / silu
    tensors["lm_head.weight"] = (SHARPNESS * points().roll(1, 0) / HIDDEN**0.5)[ids]
    provenance = {
        "target_sha256": weights_sha256(target),
        "vocabulary_sha256": vocabulary_sha256(target / "tokenizer.json"),
    }
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, shape, tensors, provenance)
    return folder


def counted(last: int, tokens: int) -> list[int]:
    """Return what the target writes after a token."""
    return [(last + 1 + n) % VOCAB for n in range(tokens)]


def accepted(last: int, length: int) -> int:
    """Return how many of ``length`` proposed tokens after ``last`` the target accepts."""
    following = counted(last, length)
    return next((n for n, token in enumerate(following) if token in UNKNOWN), length)
