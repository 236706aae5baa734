"""A model small enough to train heads of in a test, and the arguments of such a training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engines_build.distill.arguments import parse

SHORTLIST = 64


def write_target(folder: Path) -> Path:
    """Write a random two-layer Llama with a byte-level tokenizer of about 300 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["SELECT name FROM customers"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config.num_key_value_heads, config.head_dim, config.tie_word_embeddings = 2, 16, True
    config.eos_token_id = tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def arguments(model: Path, folder: Path, **changes: Any) -> argparse.Namespace:
    """Return the arguments of a short training."""
    values = {
        "target": model,
        "out": folder / "draft",
        "sources": "sql",
        "taps": "1,2",
        "shortlist": SHORTLIST,
    }
    values |= {
        "judged": "sql",
        "tokens": 1500,
        "held-out-tokens": 400,
        "train-tokens": 8000,
        "batch": 4,
        "slots": 4,
        "answers": 1,
    }
    values |= changes
    return parse([word for name, value in values.items() for word in (f"--{name}", str(value))])
