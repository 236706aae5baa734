"""Traces from the client's span through Triton's to the steps, as an operator's collector gets
them.
"""

import json
import secrets
import urllib.request

import pytest

from tests.collector import attributes, collecting
from tests.server.harness import infer_request, text_of

PERF = {"return_num_output_tokens": True, "return_perf_metrics": True}


@pytest.fixture(scope="module")
def collector():
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def traced(start_service, collector):
    """A service that traces every request."""
    return start_service(
        TRACE_URL=collector.url, TRACE_RATE="1", OTEL_BSP_SCHEDULE_DELAY="200"
    ).wait_ready()


def new_context():
    """Return a client's trace id, span id and header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-01"}


def generate(service, header, model="ensemble", **inputs):
    body = json.dumps({"text_input": "trace me ", "end_id": -1, **inputs}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{service.http}/v2/models/{model}/generate", body, header
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def parent_of(found, name):
    return {span["parentSpanId"] for span in found[name]}


def only(found, name):
    (span,) = found[name]
    return span["spanId"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_trace_goes_from_the_client_through_triton_to_the_steps(traced, collector, model):
    trace_id, client, header = new_context()
    reply = generate(traced, header, model, max_tokens=40, **PERF)
    found = collector.wait_for(trace_id, "InferRequest", model, "spindle.request", "spindle.decode")
    assert parent_of(found, "InferRequest") == {client}
    assert parent_of(found, model) == {only(found, "InferRequest")}
    assert parent_of(found, "spindle.request") == {only(found, model)}
    for phase in ("tokenise", "queue", "prefill", "decode"):
        assert parent_of(found, f"spindle.{phase}") == {only(found, "spindle.request")}
    assert parent_of(found, "spindle.step") == {
        only(found, "spindle.prefill"),
        only(found, "spindle.decode"),
    }
    assert {span["service"] for span in found["spindle.step"]} == {"spindle"}
    steps = [attributes(span) for span in found["spindle.step"]]
    assert sum(step["spindle.emitted"] for step in steps) == reply["num_output_tokens"] == 40
    assert sum(step["spindle.length"] for step in steps) == reply["total_draft_tokens"]
    assert (
        sum(step["spindle.accepted"] for step in steps) == reply["total_accepted_draft_tokens"] > 0
    )
    assert {step["spindle.draft"] for step in steps if step["spindle.length"]} <= {"good", "poor"}
    assert all(
        step["spindle.batch_size"] == 1 and step["spindle.emitted"] <= step["spindle.accepted"] + 1
        for step in steps
    )
    (request,) = found["spindle.request"]
    assert attributes(request)["gen_ai.response.finish_reasons"] == ["length"]
    assert [event["name"] for event in request["events"]] == ["first_token"]


def test_streams_over_grpc_are_traced_apart(traced, collector):
    contexts = [new_context() for _ in range(6)]
    with traced.stub() as stub:
        streams = [
            stub.ModelStreamInfer(
                iter(
                    [
                        infer_request(
                            "ensemble", text_input=f"{i}", max_tokens=20 + i, stream=True, end_id=-1
                        )
                    ]
                ),
                metadata=tuple(header.items()),
            )
            for i, (_, _, header) in enumerate(contexts)
        ]
        assert all(
            "".join(text_of(message.infer_response) for message in stream) for stream in streams
        )
    spans = {"InferRequest", "ensemble", "spindle.request"}
    for i, (trace_id, _, _) in enumerate(contexts):
        found = collector.wait_for_any(
            lambda trace, i=i: _tokens(trace) == 20 + i and spans <= set(trace)
        )
        assert parent_of(found, "spindle.request") == {only(found, "ensemble")}
        if (
            only_trace(found) != trace_id
        ):  # of streams that begin at once Triton 2.51 now and then does not see the context
            assert not any(span.get("parentSpanId") for span in found["InferRequest"])


def _tokens(trace):
    return sum(attributes(span)["spindle.emitted"] for span in trace.get("spindle.step", ()))


def only_trace(trace):
    """Return the id that all spans of a trace have."""
    (trace_id,) = {span["traceId"] for spans in trace.values() for span in spans}
    return trace_id


def test_a_refused_request_ends_its_trace_with_the_code_alone(traced, collector):
    trace_id, _, header = new_context()
    with pytest.raises(urllib.error.HTTPError):
        generate(traced, header, max_tokens=100_000)
    (request,) = collector.wait_for(trace_id, "spindle.request")["spindle.request"]
    assert attributes(request)["error.type"] == "INVALID_ARGUMENT"
    assert request["status"]["message"] == "INVALID_ARGUMENT"


def test_the_launcher_s_own_probes_are_not_traced(traced, collector):
    seen = len([span for span in collector.spans if span["name"] == "spindle"])
    probes = traced.metric("nv_inference_request_success", model="spindle")
    traced.wait_until(
        lambda: traced.metric("nv_inference_request_success", model="spindle") >= probes + 2, 15
    )
    trace_id, _, header = new_context()
    generate(traced, header, max_tokens=1)
    collector.wait_for(trace_id, "ensemble")
    assert len([span for span in collector.spans if span["name"] == "spindle"]) == seen


@pytest.mark.slow
def test_rate_zero_traces_only_requests_that_bring_a_context(
    start_service, collector, reference_text
):
    service = start_service(
        TRACE_URL=collector.url, TRACE_RATE="0", OTEL_BSP_SCHEDULE_DELAY="200"
    ).wait_ready()
    before = len(collector.spans)
    assert service.generate("abc", 5)[1]["text_output"] == "abc" + reference_text("abc", 5)
    trace_id, _, header = new_context()
    generate(service, header, max_tokens=1)
    collector.wait_for(trace_id, "spindle.request", "InferRequest")
    assert {span["traceId"] for span in collector.spans[before:]} == {trace_id}
    service.stop()
