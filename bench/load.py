"""Streaming gRPC clients for the load benchmarks: one request a stream, every kind of
ending counted by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from backend.loopback import CHANNEL_OPTIONS
from tests.server.harness import infer_request

FINAL, CANCELLED, UNANSWERED = "final", "cancelled by client", "unanswered"
ANSWER_LIMIT_S = 180.0
"""A request that has no ending after so long counts as unanswered."""


@dataclass(slots=True)
class RequestOutcome:
    """How one request went: ``outcome`` is one of the above or the name of a gRPC status; times are
    ``time.perf_counter`` seconds.

    ``drafts`` has (proposed, accepted) tokens by draft.
    """

    sent_s: float
    outcome: str = UNANSWERED
    message: str = ""
    responses: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    text: str = ""
    finish_reason: str = ""
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    input_tokens: int = 0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two responses that carry text."""
        return [
            later - earlier
            for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        ]

    @property
    def token_s(self) -> float | None:
        """Mean time between two tokens, from the first response to the last; None with fewer than
        two responses or unknown tokens.
        """
        if len(self.arrivals_s) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)


def channel(port: int) -> grpc.aio.Channel:
    """Return a connection of its own, which looks for a restarted server every second."""
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
    ]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)


async def serve(
    connection: grpc.aio.Channel,
    model: str,
    inputs: dict[str, Any],
    pause: Callable[[int], Awaitable[None]] | None = None,
    cancel_after: int | None = None,
    codes: bool = True,
) -> RequestOutcome:
    """Send one streaming request and read it to its end.

    ``pause`` is awaited before each response is read (a slow reader); after ``cancel_after``
    responses the client hangs up. ``codes``: errors are reported by status, which asks for a header
    with which Triton 2.51 crashes now and then; else an error is the outcome ``error``.
    """
    stub = service_pb2_grpc.GRPCInferenceServiceStub(connection)
    record = RequestOutcome(time.perf_counter())
    call = stub.ModelStreamInfer(
        metadata=(("triton_grpc_error", "true"),) if codes else None, timeout=ANSWER_LIMIT_S
    )
    try:
        await call.write(infer_request(model, stream=True, **inputs))
        await call.done_writing()
        await _read(call, record, pause, cancel_after)
    except grpc.aio.AioRpcError as error:
        status = error.code()
        record.outcome = UNANSWERED if status is grpc.StatusCode.DEADLINE_EXCEEDED else status.name
        record.message = error.details() or ""
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        record.outcome = CANCELLED
    record.ended_s = time.perf_counter()
    return record


async def _read(
    call: Any,
    record: RequestOutcome,
    pause: Callable[[int], Awaitable[None]] | None,
    cancel_after: int | None,
) -> None:
    finals = 0
    while cancel_after is None or record.responses < cancel_after:
        if pause is not None:
            await pause(record.responses)
        message = await call.read()
        if message is grpc.aio.EOF:
            record.outcome = (
                "error" if record.message else FINAL if finals == 1 else f"{finals} final responses"
            )
            return
        record.responses += 1
        record.message = record.message or message.error_message
        if message.infer_response.outputs:
            record.arrivals_s.append(time.perf_counter())
            _record_reply(message.infer_response, record)
        finals += message.infer_response.parameters["triton_final_response"].bool_param
    call.cancel()
    record.outcome = CANCELLED


def _record_reply(response: Any, record: RequestOutcome) -> None:
    """Note what the outputs of a response say; those that were not asked for are not there."""
    raw = dict(
        zip((output.name for output in response.outputs), response.raw_output_contents, strict=True)
    )
    record.text += raw.get("text_output", b"")[4:].decode()
    record.finish_reason = raw.get("finish_reason", b"")[4:].decode() or record.finish_reason
    for name, field_name in _COUNTS.items():
        if name in raw:
            setattr(record, field_name, int.from_bytes(raw[name], "little"))
    if "draft_names" in raw:
        proposed, accepted = (
            np.frombuffer(raw[name], np.int32).tolist()
            for name in ("draft_tokens", "accepted_draft_tokens")
        )
        record.drafts = dict(
            zip(_strings(raw["draft_names"]), zip(proposed, accepted, strict=True), strict=True)
        )


def _strings(raw: bytes) -> list[str]:
    """Return the strings of a tensor, each after its length in four bytes."""
    texts, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        texts.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return texts


_COUNTS = {
    "num_input_tokens": "input_tokens",
    "num_output_tokens": "output_tokens",
    "total_draft_tokens": "drafted",
    "total_accepted_draft_tokens": "accepted",
}


def percentiles_ms(values_s: list[float]) -> dict[str, float] | None:
    """Return the 50th, 95th and 99th percentile in milliseconds."""
    return (
        {f"p{q}": round(1e3 * float(np.percentile(values_s, q)), 2) for q in (50, 95, 99)}
        if values_s
        else None
    )
