"""Memory of the CUDA engine besides that of every step engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from backend.config import EngineConfig, ServingConfig
from backend.engines.checkpoint import DTYPES, LlamaConfig, read_config
from backend.engines.cuda.forward import most_graph_tokens
from backend.engines.cuda.pages import PAGE
from backend.engines.models import footprint as planning
from backend.engines.port import Footprint

RUNTIME_BYTES = 512 << 20
"""Bytes of CUDA graphs, cuBLAS's workspaces and compiled kernels on a GPU; a guess, not measured.
"""

_SLOT_BYTES = 48
"""Bytes of a sequence's slot, besides its block table: length, last token, seed and options."""


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    limits = config.limits
    planned = planning.footprint(engine, config, folder, scratch_tokens=PAGE)
    shape, item = read_config(folder), DTYPES[engine.dtype].itemsize
    passes = planned.passes + _prompt_bytes(shape, config, item)
    if engine.lookahead:
        blocks = -(-limits.max_context_tokens // PAGE) + 3
        passes += (limits.max_active_requests + 1) * (4 * blocks + _SLOT_BYTES)
    if engine.device != "cpu":
        passes += _graph_bytes(shape, config, item) + RUNTIME_BYTES
    return replace(planned, passes=passes)


def _prompt_bytes(shape: LlamaConfig, config: ServingConfig, item: int) -> int:
    """Return what attention of a prompt takes: a row's keys and values in one piece."""
    kv_row = 2 * shape.num_kv_heads * shape.head_dim
    return (config.limits.max_context_tokens + PAGE) * kv_row * item


def _graph_bytes(shape: LlamaConfig, config: ServingConfig, item: int) -> int:
    """Return what the graphs' pool takes: activations and logits of the largest pass, and a copy of
    its logits.
    """
    tokens = most_graph_tokens(config.limits.max_active_requests, config.policy.k_max)
    kv_row = 2 * shape.num_kv_heads * shape.head_dim
    row = 4 * shape.hidden_size + 2 * (shape.num_heads * shape.head_dim + kv_row)
    row += 3 * shape.intermediate_size
    return tokens * item * (row + 2 * shape.vocab_size)
