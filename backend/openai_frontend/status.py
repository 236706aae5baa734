"""The status page: one file without outside resources, which reads ``/metrics`` and ``/explain``
and asks like any client.
"""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

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


async def fetch_metrics(url: str) -> str:
    """Return Triton's metrics. Raises ApiError where nobody answers."""

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as response:
            text: str = response.read().decode()
            return text

    try:
        return await asyncio.to_thread(fetch)
    except (OSError, ValueError):
        raise ApiError(503, "Triton's metrics cannot be read") from None
