"""The status page: one file without outside resources, which reads ``/metrics`` and ``/explain``
and asks like any client.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from backend.loopback import open_url
from backend.openai_frontend.errors import ApiError

PAGE = (Path(__file__).parent / "status.html").read_text("utf-8")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
LIMIT_S = 5.0
VLLM_COUNTERS = {
    "spindle_verified_proposals_total": "vllm:spec_decode_num_drafts_total",
    "spindle_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "spindle_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
}
"""Counters that AIPerf and ``vllm bench serve`` read, by the one each is the sum of."""


def with_vllm_counters(metrics: str) -> str:
    """Return metrics with vLLM's counters of speculation after them."""
    sums = dict.fromkeys(VLLM_COUNTERS, 0.0)
    for line in metrics.splitlines():
        if (name := line.partition("{")[0]) in sums:
            sums[name] += float(line.rpartition(" ")[2])
    added = (
        f"# HELP {VLLM_COUNTERS[name]} Sum of {name}\n"
        f"# TYPE {VLLM_COUNTERS[name]} counter\n"
        f"{VLLM_COUNTERS[name]} {value:.0f}\n"
        for name, value in sums.items()
    )
    return metrics + "".join(added)


async def fetch_metrics(url: str) -> str:
    """Return Triton's metrics and vLLM's counters. Raises ApiError where Triton does not answer."""

    def fetch() -> str:
        with open_url(url, LIMIT_S) as response:
            text: str = response.read().decode()
            return with_vllm_counters(text)

    try:
        return await asyncio.to_thread(fetch)
    except (OSError, ValueError):
        raise ApiError(503, "Triton's metrics cannot be read") from None
