"""Spans of traced requests, made and sent (OTLP over HTTP) off the loop's thread. OpenTelemetry is
imported only where traces are to go.

``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` (or ``OTEL_EXPORTER_OTLP_ENDPOINT``) says where;
OpenTelemetry's other variables hold too.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from backend.ops.request_trace import ErrorEnding, RequestTrace, TracedStep
from backend.ops.stats import StepStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_WAITING_TRACES = 128
"""Traces that wait for a slow collector; further ones are dropped whole, and counted."""
SPANS_A_POST, PAUSE_S = 32, 0.02
"""Encoding spans holds the interpreter lock that the loop needs, so it is done in small pieces with
a pause after each.
"""
CLOSE_LIMIT_S = 1.0


class Tracing:
    """``begin`` and ``finish`` return at once and may be called from any thread. Without an
    endpoint nothing is traced.
    """

    def __init__(self, stats: StepStats, environment: Mapping[str, str] = os.environ) -> None:
        self._stats = stats
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(MAX_WAITING_TRACES)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if any(environment.get(name) for name in ENDPOINTS):
            self._thread = threading.Thread(
                target=self._run, args=_sdk(), name="traces", daemon=True
            )
            self._thread.start()

    def begin(self, context: dict[str, str] | None) -> RequestTrace | None:
        """Return the trace of a request that came with a context (W3C ``traceparent``); None for
        any other.
        """
        if context is None:
            return None
        if self._thread is None:
            self._stats.fallback("trace_without_endpoint")
            return None
        return RequestTrace(context)

    def finish(self, trace: RequestTrace) -> None:
        """Have a trace sent that has ended."""
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._stats.fallback("trace_dropped")

    def close(self) -> None:
        """Send what waits, for at most ``CLOSE_LIMIT_S``."""
        if self._thread is None:
            return
        deadline_s = monotonic() + CLOSE_LIMIT_S
        self._closing.set()
        try:
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline_s - monotonic()))

    def _run(self, tracer: Tracer, exporter: SpanExporter) -> None:
        while (trace := self._queue.get()) is not None:
            if not self._send(spans_of(trace, tracer), exporter):
                self._stats.fallback("trace_export")
        exporter.shutdown()

    def _send(self, spans: Iterator[ReadableSpan], exporter: SpanExporter) -> bool:
        """Return whether the collector took all of a trace; when not, the log says why."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            while batch := list(islice(spans, SPANS_A_POST)):
                if exporter.export(batch) is not SpanExportResult.SUCCESS:
                    return False
                self._closing.wait(PAUSE_S)
        except Exception:
            logger.exception("a trace could not be sent")
            return False
        return True


def _sdk() -> tuple[Tracer, SpanExporter]:
    exporter: SpanExporter
    try:
        from opentelemetry.exporter.otlp.json.http import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    except ModuleNotFoundError:  # vLLM's environment has the other one
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Proto

        exporter = Proto()
    return tracer(), exporter


def tracer() -> Tracer:
    """Return a tracer; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` go before the
    service's own name.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource({"service.name": "spindle"}).merge(OTELResourceDetector().detect())
    return TracerProvider(resource=resource, shutdown_on_exit=False).get_tracer("spindle")


def spans_of(trace: RequestTrace, tracer: Tracer) -> Iterator[ReadableSpan]:
    """Yield an ended trace's spans: ``spindle.request`` under the caller's span, in it the phases,
    in them their steps.
    """
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def at(seconds: float) -> int:
        return int((seconds + trace.epoch_s) * 1e9)

    def start(
        name: str, context: Any, started_s: float, attributes: dict[str, Any] | None = None
    ) -> Any:
        return tracer.start_span(name, context, start_time=at(started_s), attributes=attributes)

    def end(span: Any, ended_s: float) -> Any:
        span.end(at(ended_s))
        return span

    parent = TraceContextTextMapPropagator().extract(trace.context)
    request = start(
        "spindle.request", parent, trace.phases[0].started_s, _request_attributes(trace)
    )
    if not request.is_recording():  # the caller's own decision, in its context
        return
    ends_s = [*(phase.started_s for phase in trace.phases[1:]), trace.ended_s]
    for index, (phase, end_s) in enumerate(zip(trace.phases, ends_s, strict=True)):
        span = start(f"spindle.{phase.name}", set_span_in_context(request), phase.started_s)
        inside = set_span_in_context(span)
        for step in (step for step in trace.steps if step.phase == index):
            yield end(
                start("spindle.step", inside, step.started_s, _step_attributes(step)), step.ended_s
            )
        yield end(span, end_s)
    if (first := next((step for step in trace.steps if step.emitted), None)) is not None:
        request.add_event("first_token", timestamp=at(first.ended_s))
    if isinstance(trace.ending, ErrorEnding):
        request.set_status(Status(StatusCode.ERROR, trace.ending.code))
    yield end(request, trace.ended_s)


def _request_attributes(trace: RequestTrace) -> dict[str, Any]:
    """Return the figures of a whole request; the names with ``gen_ai`` are OpenTelemetry's semantic
    conventions.
    """
    if isinstance(trace.ending, ErrorEnding):
        return {**trace.attributes, "error.type": trace.ending.code}
    assert trace.ending is not None
    reason, usage = trace.ending
    return {
        **trace.attributes,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.response.finish_reasons": [reason],
        "spindle.draft_tokens": usage.drafted,
        "spindle.accepted_draft_tokens": usage.accepted,
    }


def _step_attributes(step: TracedStep) -> dict[str, Any]:
    """Return a step's figures; ``batch_size``, ``prefill_tokens`` and the times are the whole
    batch's.
    """
    return {
        "spindle.draft": step.draft,
        "spindle.length": step.length,
        "spindle.accepted": step.accepted,
        "spindle.emitted": step.emitted,
        "spindle.batch_size": step.batch_size,
        "spindle.prefill_tokens": step.prefill_tokens,
        **{
            f"spindle.time.{part.replace(':', '.')}_s": seconds
            for part, seconds in step.parts_s.items()
        },
    }
