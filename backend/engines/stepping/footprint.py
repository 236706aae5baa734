"""What a step engine will take of memory, from its checkpoint's configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from backend.engines.checkpoint import DTYPES, read_config
from backend.engines.port import Footprint
from backend.kinds import Kind
from backend.machine import machine

LOGIT_BYTES = 28
"""Bytes for each logit of a pass while laws are made of them (copies, sort and indices of top-p):
24 measured in bf16, two more in fp32.
"""

LAW_BYTES = 4
"""Bytes for each probability of a law that a draft keeps until it is verified."""


def activation_bytes(dtype: str) -> int:
    """Return the bytes of a number of activations and KV; int8 rounds matrices only."""
    if dtype == "int8":
        return 2 if machine.multiplies_bf16() else 4
    return DTYPES[dtype].itemsize


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], kind: Kind, dtype: str) -> int:
    """Return what weights of these shapes take in an engine of a kind."""
    looked_up, multiplied = kind.weight_bytes.get(dtype) or (DTYPES[dtype].itemsize,) * 2
    embedding = prod(shapes["model.embed_tokens.weight"])
    tied = kind.packs_head and "lm_head.weight" not in shapes
    others = sum(map(prod, shapes.values())) - (0 if tied else embedding)
    return looked_up * embedding + multiplied * others


def footprint(
    folder: Path,
    kind: Kind,
    dtype: str,
    device: str,
    *,
    kv_tokens: int,
    rows: int,
    logit_rows: int,
    law_rows: int,
    kept_rows: int = 0,
    kept_bytes: int = 0,
) -> Footprint:
    """Return what a model takes; its largest pass has ``rows`` rows, of which ``logit_rows`` want
    logits, and keeps ``law_rows`` laws. Up to ``kept_rows`` of the others, as many as are
    ``kept_bytes`` in fp32, give logits that are kept for replies. Raises CheckpointError for a
    folder that cannot be served.
    """
    config, item = read_config(folder), activation_bytes(dtype)
    weights = weight_bytes(config.shapes(), kind, dtype)
    kv_row = 2 * config.num_kv_heads * config.head_dim
    attention = 2 * (
        config.num_heads * config.head_dim + kv_row
    )  # qkv, and again while rotated or joined
    row = 4 * config.hidden_size + attention + 3 * config.intermediate_size
    vocab = config.draft_vocab_size or config.vocab_size
    passes = rows * row * item + vocab * (logit_rows * LOGIT_BYTES + law_rows * LAW_BYTES)
    passes += vocab * min(kept_rows, kept_bytes // (4 * vocab)) * (item + 4)
    kv = (kv_tokens + kind.scratch_tokens) * config.num_layers * kv_row * item
    return Footprint(device, weights, kv, passes)


def free_bytes(device: str) -> int:
    """Return what is free on a CUDA device."""
    return torch.cuda.mem_get_info(device)[0]
