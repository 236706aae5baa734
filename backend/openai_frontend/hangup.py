"""Cancellation of a request whose client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response

WATCH_PERIOD_S = 0.25


async def until_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what ``work`` returns; cancel it when the client hangs up before."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=WATCH_PERIOD_S)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
