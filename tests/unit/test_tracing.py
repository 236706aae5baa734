"""The spans of a traced request, and what tracing does when it cannot."""

import subprocess
import sys
import time
from itertools import pairwise

import pytest

from backend.app import build
from backend.config import parse_config
from backend.ops import tracing as module
from backend.ops.request_trace import ErrorEnding, RequestTrace, ServedEnding
from backend.ops.stats import Stats, StepStats, Usage
from backend.ops.tracing import Tracing, spans_of, tracer
from backend.request import GenerationRequest
from backend.sequence import Proposal
from backend.speculation.step_log import StepLog
from tests.collector import attributes, collecting
from tests.fakes.clients import SureSink
from tests.fakes.waiting import wait_until

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FINAL = ServedEnding("length", Usage(9, 4, 3, 2))


def context(flags="01"):
    return {"traceparent": f"00-{TRACE_ID}-{CALLER}-{flags}"}


def step_log():
    log = StepLog(("small",), batch_size=5, prefill_tokens=7)
    with log.part("draft:small"), log.part("verify"):
        pass
    return log


def ended_trace(ending=None, flags="01"):
    """A request of two prefill steps and one with a proposal, pre-empted once while it waits for
    its second chunk.
    """
    trace = RequestTrace(context(flags))
    for phase in ("queue", "prefill"):
        trace.enter(phase)
    trace.step(step_log(), None, 0, 0)
    for phase in ("queue", "prefill"):
        trace.enter(phase)
    trace.step(step_log(), None, 0, 1)
    trace.step(step_log(), Proposal.chain("small", [1, 2, 3]), 2, 3)
    trace.end(ending or FINAL)
    return trace


def tree(spans):
    """Return (name, name of the parent) of spans in order of their start."""
    names = {span.context.span_id: span.name for span in spans}
    ordered = sorted(spans, key=lambda span: (span.start_time, span.name == "spindle.step"))
    return [
        (
            span.name.removeprefix("spindle."),
            names.get(span.parent.span_id, "").removeprefix("spindle."),
        )
        for span in ordered
    ]


def test_spans_hang_under_the_caller_in_phases_that_follow_each_other():
    spans = list(spans_of(ended_trace(), tracer()))
    assert all(f"{span.context.trace_id:032x}" == TRACE_ID for span in spans)
    request = spans[-1]
    assert f"{request.parent.span_id:016x}" == CALLER
    phases = [span for span in spans if span.parent.span_id == request.context.span_id]
    assert [span.name for span in phases] == [
        f"spindle.{name}" for name in ("tokenise", "queue", "prefill", "queue", "prefill", "decode")
    ]
    assert phases[0].start_time == request.start_time
    assert all(before.end_time == after.start_time for before, after in pairwise(phases))
    assert phases[-1].end_time == request.end_time
    assert [parent for name, parent in tree(spans) if name == "step"] == [
        "prefill",
        "prefill",
        "decode",
    ]


def test_times_are_wall_times_near_now():
    request = list(spans_of(ended_trace(), tracer()))[-1]
    assert abs(request.end_time / 1e9 - time.time()) < 5
    assert request.start_time < request.end_time


def test_figures_of_request_and_step_are_attributes_and_the_text_is_not():
    spans = list(spans_of(ended_trace(), tracer()))
    request, step = (
        spans[-1],
        next(span for span in spans if span.attributes and span.attributes.get("spindle.length")),
    )
    assert dict(request.attributes) == {
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "spindle.draft_tokens": 3,
        "spindle.accepted_draft_tokens": 2,
    }
    figures = dict(step.attributes)
    assert figures.pop("spindle.time.verify_s") >= 0
    assert figures.pop("spindle.time.draft.small_s") >= 0
    assert figures == {
        "spindle.draft": "small",
        "spindle.length": 3,
        "spindle.accepted": 2,
        "spindle.emitted": 3,
        "spindle.batch_size": 5,
        "spindle.prefill_tokens": 7,
    }
    decode = next(span for span in spans if span.name == "spindle.decode")
    assert [(event.name, event.timestamp) for event in request.events] == [
        ("first_token", decode.start_time)
    ]


def test_an_error_is_the_status_of_the_request():
    trace = RequestTrace(context())
    trace.end(ErrorEnding("UNAVAILABLE"))
    spans = list(spans_of(trace, tracer()))
    assert [span.name for span in spans] == ["spindle.tokenise", "spindle.request"]
    status = spans[-1].status
    assert (status.status_code.name, status.description) == ("ERROR", "UNAVAILABLE")
    assert spans[-1].attributes["error.type"] == "UNAVAILABLE"
    assert not spans[-1].events


def test_a_caller_that_does_not_sample_is_obeyed():
    assert list(spans_of(ended_trace(flags="00"), tracer())) == []


def test_the_steps_of_a_pre_empted_request_add_up_to_its_usage():
    drafts = [{"name": "small", "engine": "tests.fakes.fake"}]
    cramped = {"kv_cache_tokens": 256}
    app = build(
        parse_config(
            {
                "target": {"engine": "tests.fakes.fake"},
                "drafts": drafts,
                "policy": {"kind": "random"},
                "limits": cramped,
            }
        )
    )
    sessions = [
        app.session(GenerationRequest(f"prompt {i}", 200, end_id=-1), SureSink()) for i in range(2)
    ]
    for session in sessions:
        session.trace = RequestTrace(context())
        session.trace.enter("queue")
        app.orchestrator.submit(session)
    while app.orchestrator.step():
        pass
    lives = [[phase.name for phase in session.trace.phases] for session in sessions]
    assert lives[0] == ["tokenise", "queue", "prefill", "decode"]
    assert lives[1][:7] == ["tokenise", "queue", "prefill", "decode", "queue", "prefill", "decode"]
    for session in sessions:
        assert (
            sum(step.emitted for step in session.trace.steps)
            == session.sink.usage.output_tokens
            == 200
        )
        assert sum(step.accepted for step in session.trace.steps) == session.sink.usage.accepted > 0
        assert sum(step.length for step in session.trace.steps) == session.sink.usage.drafted
        assert all(
            session.trace.phases[step.phase].name in ("prefill", "decode")
            for step in session.trace.steps
        )


class Counted:
    def __init__(self):
        self._stats = Stats()
        self.step_stats = StepStats(self._stats)
        self.counts = {}

    def fallbacks(self):
        for name, labels, value in self._stats.drain().counters:
            assert name == "spindle_fallback_total"
            self.counts[labels["reason"]] = self.counts.get(labels["reason"], 0) + value
        return self.counts


@pytest.fixture
def counted():
    return Counted()


def tracing_to(url, counted, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
    return Tracing(counted.step_stats)


def test_long_traces_arrive_whole_and_are_flushed_at_the_end(counted, monkeypatch):
    with collecting() as collector:
        tracing = tracing_to(collector.url, counted, monkeypatch)
        trace = tracing.begin(context())
        trace.enter("queue")
        trace.enter("prefill")
        for _ in range(3 * module.SPANS_A_POST):
            trace.step(step_log(), None, 0, 1)
        trace.end(FINAL)
        tracing.finish(trace)
        tracing.close()
        found = collector.trace(TRACE_ID)
    assert {name: len(spans) for name, spans in found.items()} == {
        "spindle.request": 1,
        "spindle.tokenise": 1,
        "spindle.queue": 1,
        "spindle.prefill": 1,
        "spindle.decode": 1,
        "spindle.step": 3 * module.SPANS_A_POST,
    }
    assert {span["service"] for spans in found.values() for span in spans} == {"spindle"}
    assert attributes(found["spindle.request"][0])["gen_ai.response.finish_reasons"] == ["length"]
    assert counted.fallbacks() == {}


def test_a_collector_that_is_down_costs_a_count_and_no_waiting(counted, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_TRACES", 2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing = tracing_to("http://127.0.0.1:9/v1/traces", counted, monkeypatch)
    for _ in range(20):
        tracing.finish(ended_trace())  # a finish that waited for the collector would find room
    assert counted.fallbacks()["trace_dropped"] >= 20 - 2 - 2  # two wait, one or two are in hand
    wait_until(lambda: counted.fallbacks().get("trace_export"))
    tracing.close()


def test_without_a_context_nothing_is_traced_and_without_an_endpoint_it_is_counted(counted):
    tracing = Tracing(counted.step_stats, {})
    assert tracing.begin(None) is None
    assert counted.fallbacks() == {}
    assert tracing.begin(context()) is None
    assert counted.fallbacks() == {"trace_without_endpoint": 1}
    tracing.close()


def test_a_service_without_an_endpoint_does_not_even_import_opentelemetry():
    code = (
        "import sys; from backend.app import build; from backend.config import parse_config;"
        "build(parse_config({'target': {'engine': 'tests.fakes.fake'}})).close();"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    quick = {"PATH": "", "NUMBA_DISABLE_JIT": "1"}  # compiling takes half a minute
    subprocess.run([sys.executable, "-c", code], check=True, env=quick, timeout=60)
