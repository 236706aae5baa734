"""One request, streaming or whole, through Triton's HTTP interface or the OpenAI front end, with
the endings of ``load``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from bench.load import ANSWER_LIMIT_S, CANCELLED, FINAL, UNANSWERED, RequestOutcome

Pause = Callable[[int], Awaitable[None]]


async def serve_http(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    pause: Pause | None = None,
    cancel_after: int | None = None,
) -> RequestOutcome:
    """Send a request and read its events or its one body to the end; after ``cancel_after`` of them
    the client hangs up.
    """
    record = RequestOutcome(time.perf_counter())
    try:
        async with session.post(
            url, json=body, timeout=aiohttp.ClientTimeout(ANSWER_LIMIT_S)
        ) as response:
            if response.status != 200:
                record.outcome, record.message = (
                    f"HTTP {response.status}",
                    (await response.text())[:200],
                )
            elif response.content_type == "text/event-stream":
                await _events(response, record, pause, cancel_after)
            else:
                _whole(await response.text(), record)
    except asyncio.TimeoutError:
        record.outcome = UNANSWERED
    except aiohttp.ClientError as error:
        record.outcome, record.message = "connection lost", str(error)
    record.ended_s = time.perf_counter()
    return record


def _whole(text: str, record: RequestOutcome) -> None:
    record.responses = 1
    body = json.loads(text)
    record.outcome = "error" if "error" in body else FINAL
    record.message = str(body.get("error", ""))


async def _events(
    response: Any, record: RequestOutcome, pause: Pause | None, cancel_after: int | None
) -> None:
    """Triton's last event has a finish reason, the front end's is [DONE]; an error ends either, and
    nothing may follow an end.
    """
    ends = 0
    async for raw in response.content:
        line = raw.decode().strip()
        if not line.startswith("data: "):
            continue
        if cancel_after is not None and record.responses >= cancel_after:
            record.outcome = CANCELLED
            return
        if pause is not None:
            await pause(record.responses)
        record.responses += 1
        record.arrivals_s.append(time.perf_counter())
        event = None if line == "data: [DONE]" else json.loads(line[6:])
        if event is not None and "error" in event:
            record.outcome, record.message = "error", str(event["error"])
            ends += 1
        elif event is None or "finish_reason" in event:
            record.outcome = FINAL
            ends += 1
    if ends != 1:
        record.outcome = f"{ends} final responses"
