"""Answers of the kind ``cuda`` before an engine of it is made (``KindModule``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.models.kind import check_any_decoder as check_folder
from backend.engines.models.kind import latency_cases
from backend.engines.models.reading import read_spec
from backend.engines.port import Engine, Footprint
from backend.kinds import heads_of
from backend.storage.manifest import read_model_config

if TYPE_CHECKING:
    from backend.engines.registry import Service

logger = logging.getLogger(__name__)

__all__ = ["RUNTIME_BYTES", "check_folder", "footprint", "latency_cases", "make"]

RUNTIME_BYTES = 512 << 20
"""Bytes of CUDA graphs, cuBLAS's workspaces and compiled kernels on a GPU; a guess, not measured.
"""

_SLOT_BYTES = 48
"""Bytes of a sequence's slot besides its block table: length, last token, seed and options."""

LEAST_CAPABILITY = 8.0

GPU_PACKAGE = "triton"

GPU_DTYPES = ("bf16",)


def make(engine: EngineConfig, service: Service) -> Engine:
    """Load an engine."""
    import torch

    from backend.engines.cuda.engine import CudaEngine
    from backend.engines.cuda.forward import most_graph_tokens
    from backend.engines.models.comparison import run_eagerly
    from backend.engines.models.loading import load_decoder
    from backend.engines.models.probe import check_taps

    folder = service.path(engine)
    logger.info("%s: %s by the engine cuda on %s", engine.name, engine.dtype, engine.device)
    taps = service.taps if engine.name == service.config.target.name else ()
    spec = read_spec(folder)
    check_taps(folder, spec, taps)
    if engine.device == "cpu":
        torch.set_num_threads(service.threads)
    lm: Any = load_decoder(folder, engine.dtype, engine.device)
    expected = run_eagerly(lm)

    def count(reason: str) -> None:
        if service.count is not None:
            service.count("spindle_fallback_total", reason=reason)

    sizes, sequences = service.sizes, service.config.limits.max_active_requests
    kind: Callable[..., CudaEngine] = CudaEngine
    if engine.lookahead:
        from backend.engines.cuda.lookahead import LookaheadEngine

        kind = partial(LookaheadEngine, sequences=sequences)
    target = kind(
        engine.name,
        lm,
        vocab_size=spec.vocab_size,
        kv_blocks=sizes["kv_blocks"],
        max_context_tokens=sizes["max_context_tokens"],
        max_draft_tokens=sizes["max_draft_tokens"],
        taps=taps,
        invariant=engine.invariant,
        graph_tokens=most_graph_tokens(sequences, service.config.policy.k_max),
        count=count,
    )
    difference = target.check(expected, f"{engine.name}: {folder}")
    text = "%s: %.1g standard deviations from transformers' own forward"
    logger.info(text, engine.name, difference)
    return target


def footprint(engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
    """Return what an engine takes of memory."""
    # They import torch.
    from backend.engines.checkpoint import NUMBER_BYTES
    from backend.engines.cuda.forward import most_graph_tokens
    from backend.engines.cuda.pages import PAGE, partial_bytes, row_pages
    from backend.engines.models import footprint as planning

    limits, k_max = config.limits, config.policy.k_max
    planned = planning.footprint(engine, config, folder, scratch_tokens=PAGE)
    spec, item = read_spec(folder), NUMBER_BYTES[engine.dtype]
    pages = row_pages(limits.max_context_tokens, k_max)
    kv_row = spec.kv_width // len(spec.layers)
    # Attention of a prompt has a row's keys and values in one piece.
    passes = planned.passes + pages * PAGE * kv_row * item
    if engine.lookahead:
        passes += (limits.max_active_requests + 1) * (4 * pages + _SLOT_BYTES)
    if engine.device != "cpu":
        # Activations and logits of the largest pass that is captured, a copy of its logits, and
        # what attention has of each piece of a context.
        tokens = most_graph_tokens(limits.max_active_requests, k_max)
        passes += tokens * item * (spec.row_width + 2 * spec.vocab_size) + RUNTIME_BYTES
        heads, dim = heads_of(read_model_config(folder))
        passes += partial_bytes(tokens, heads, dim, pages * PAGE)
    return replace(planned, passes=passes)
