"""What a torch engine will take of memory, from its checkpoint's configuration alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from backend.engines.port import Footprint
from backend.engines.torch.checkpoint import DTYPES, ROUNDED, is_matrix, read_config
from backend.engines.torch.llama import SMALL_WEIGHT

LOGIT_BYTES = 28
"""Bytes for each logit of a pass while laws are made of them (copies, sort and indices of top-p):
24 measured in bf16, two more in fp32.
"""

LAW_BYTES = 4
"""Bytes for each probability of a law that a draft keeps until it is verified."""


def footprint(
    folder: Path,
    dtype: str,
    device: str,
    *,
    kv_tokens: int,
    rows: int,
    logit_rows: int,
    law_rows: int,
    kept_rows: int = 0,
    kept_bytes: int = 0,
    padded_tokens: int = 0,
    padded_queries: int = 0,
) -> Footprint:
    """Return what a model takes; its largest pass has ``rows`` rows, of which ``logit_rows`` want
    logits, and keeps ``law_rows`` laws. Up to ``kept_rows`` of the others, as many as are
    ``kept_bytes`` in fp32, give logits that are kept for replies. Where rows are padded, a layer's
    attention copies ``padded_tokens`` KV rows and masks them for so many queries each. Raises
    CheckpointError for a folder that cannot be served.
    """
    config, item = read_config(folder), DTYPES[dtype].itemsize
    shapes = config.shapes()
    weights = item * sum(map(prod, shapes.values()))
    if config.tied and not config.draft_vocab_size and device == "cpu":
        shapes["lm_head.weight"] = (
            config.vocab_size,
            config.hidden_size,
        )  # packed apart from the embedding
        weights += item * prod(shapes["lm_head.weight"])
    if dtype in ROUNDED:  # to half of what activations have
        matrices = [prod(shape) for name, shape in shapes.items() if is_matrix(name, shape)]
        weights -= (
            item // 2 * sum(size for size in matrices if dtype == "int8" or size >= SMALL_WEIGHT)
        )
    kv_row = 2 * config.num_kv_heads * config.head_dim
    attention = 2 * (
        config.num_heads * config.head_dim + kv_row
    )  # qkv, and again while rotated or joined
    row = 4 * config.hidden_size + attention + 3 * config.intermediate_size
    if dtype == "int8":
        row += 12 * config.intermediate_size  # fp32 products of two digits, and their sum
    vocab = config.draft_vocab_size or config.vocab_size
    passes = rows * row * item + vocab * (logit_rows * LOGIT_BYTES + law_rows * LAW_BYTES)
    passes += vocab * min(kept_rows, kept_bytes // (4 * vocab)) * (item + 4)
    passes += (
        padded_tokens * (kv_row + padded_queries * config.num_heads // config.num_kv_heads) * item
    )
    return Footprint(device, weights, kv_tokens * config.num_layers * kv_row * item, passes)


def free_bytes(device: str) -> int:
    """Return what is free on a CUDA device."""
    return torch.cuda.mem_get_info(device)[0]
