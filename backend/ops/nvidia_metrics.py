"""The families of NVIDIA's models (``nv_trt_llm_*``, ``nv_llm_*_token_len``), so that dashboards
and load balancers go on as they are.

As there, the gauges show the latest step; they are set when the figures are about to be read, not
at every step. A metric of something that does not exist here is constantly zero (disaggregated
serving) or absent (GPU memory that no engine tells, the metrics of static batching).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backend.sequence import BLOCK_TOKENS

MODEL = {"model": "tensorrt_llm", "version": "1"}
"""The labels of every series: all three models are served by the one engine that is this one's
there.
"""


@dataclass(slots=True)
class Latest:
    """Figures of the latest step; ``steps`` and ``reused_blocks`` count from the start."""

    active: int = 0
    queued: int = 0
    decoding: int = 0
    prefilling: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that ran."""
    paused: int = 0
    """Requests that gave their KV back."""
    kv_blocks: Mapping[str, int] = field(default_factory=dict)
    """KV blocks by state."""
    steps: int = 0
    reused_blocks: int = 0
    drift: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted time, by part of the step."""


def export(latest: Latest, max_requests: int, cpu_only: bool, gauge: Callable[..., None]) -> None:
    """Set the gauges by ``gauge(name, value, **labels)``; ``max_requests`` is the in-flight batch's
    size.
    """
    used_blocks, free_blocks = latest.kv_blocks.get("used", 0), latest.kv_blocks.get("free", 0)
    scheduled = latest.decoding + latest.prefilling
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    families: dict[tuple[str, str], dict[str, float]] = {
        ("nv_trt_llm_request_metrics", "request_type"): {
            "active": latest.active + latest.queued,
            "max": max_requests,
            "scheduled": scheduled,
            "context": latest.prefilling,
            "waiting": latest.active + latest.queued - scheduled,
        },
        ("nv_trt_llm_runtime_memory_metrics", "memory_type"): {
            "cpu": resident_pages * os.sysconf("SC_PAGE_SIZE"),
            **({"gpu": 0, "pinned": 0} if cpu_only else {}),
        },
        ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
            "max": used_blocks + free_blocks,
            "free": free_blocks,
            "used": used_blocks,
            "tokens_per": BLOCK_TOKENS,
            "reused": latest.reused_blocks,
            "fraction": used_blocks / (used_blocks + free_blocks)
            if used_blocks + free_blocks
            else 0.0,
        },
        ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
            "total_context_tokens": latest.prefill_tokens,
            "generation_requests": latest.decoding,
            "micro_batch_id": 0,
            "paused_requests": latest.paused,
        },
        ("nv_trt_llm_general_metrics", "general_type"): {
            "timestamp": round(time.time() * 1e6),
            "iteration_counter": latest.steps,
        },
    }
    for (name, label), series in families.items():
        for kind, value in series.items():
            gauge(name, value, **{label: kind}, **MODEL)
