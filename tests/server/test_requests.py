import asyncio
import json
import re
import socket
import struct
from collections import Counter

import grpc
import pytest
from tritonclient.grpc import KeepAliveOptions, service_pb2_grpc

from backend.config import load_config
from tests.server.harness import infer_request, text_of
from tests.server.tensors import END, connected

NAMES = ("ensemble", "tensorrt_llm_bls")


@pytest.mark.parametrize("model", NAMES)
def test_generate_repeats_the_prompt_and_goes_on(service, reference_text, model):
    status, reply = service.generate("Grüße 👋 ", 24, model)
    assert (status, reply["text_output"]) == (200, "Grüße 👋 " + reference_text("Grüße 👋 ", 24))
    assert reply["finish_reason"] == "length"
    assert not {"num_input_tokens", "num_output_tokens", "acceptance_rate"} & set(reply)


def test_counts_come_only_when_asked_for(service):
    flags = {
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_perf_metrics": True,
    }
    _, reply = service.generate("abc", 5, **flags)
    assert (reply["num_input_tokens"], reply["num_output_tokens"]) == (3, 5)
    assert reply["total_accepted_draft_tokens"] <= reply["total_draft_tokens"]
    assert reply["acceptance_rate"] == pytest.approx(
        reply["total_accepted_draft_tokens"] / max(1, reply["total_draft_tokens"])
    )


def test_the_reply_says_which_drafts_proposed_how_much(service):
    _, reply = service.generate("abc", 60, return_perf_metrics=True)
    names, proposed, accepted = (
        listed(reply[name]) for name in ("draft_names", "draft_tokens", "accepted_draft_tokens")
    )
    assert names
    assert set(names) <= {draft.name for draft in load_config(service.config).drafts}
    assert sum(proposed) == reply["total_draft_tokens"] > 0
    assert sum(accepted) == reply["total_accepted_draft_tokens"]
    steps = [listed(reply[name]) for name in ("per_step_drafted", "per_step_accepted")]
    assert [sum(steps[0]), sum(steps[1])] == [sum(proposed), sum(accepted)]
    histogram = listed(reply["acceptance_histogram"])
    assert histogram == [steps[1].count(tokens) for tokens in range(len(histogram))]
    assert len(histogram) == 1 + load_config(service.config).policy.k_max


def listed(value):
    """A tensor's values; ``/generate`` writes a list of one as a number."""
    return value if isinstance(value, list) else [value]


@pytest.mark.slow
@pytest.mark.parametrize("idle", [True, False])
def test_a_client_that_pings_gets_the_text_of_a_silent_request(service, reference_text, idle):
    options = KeepAliveOptions(
        keepalive_time_ms=1000,
        keepalive_permit_without_calls=idle,
        http2_max_pings_without_data=0,
    )
    inputs = {"text_input": [["ping "]], "max_tokens": [[1400]], "num_draft_tokens": [[0]]}
    with connected(service, options) as client:
        (reply,) = client.ask("ensemble", **inputs, **END, exclude_input_in_output=[[True]])
    assert reply["text_output"].item().decode() == reference_text("ping ", 1400)


def test_many_pings_are_answered_and_no_reason_to_hang_up(service):
    def frame(kind, flags=0, payload=b""):
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload

    ping, settings, go_away, ack = 6, 4, 7, 1
    with (
        socket.create_connection(("127.0.0.1", service.grpc), timeout=30) as connection,
        connection.makefile("rb") as reader,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
        for number in range(10):
            connection.sendall(frame(ping, payload=bytes(8)))
            kind = flags = 0
            while (kind, flags & ack) != (ping, ack):
                assert kind != go_away, f"the server hangs up at ping {number}"
                length, kind, flags = struct.unpack(">3sBB4x", reader.read(9))
                reader.read(int.from_bytes(length, "big"))


def test_no_draft_tokens_means_no_speculation(service):
    _, reply = service.generate("abc", 30, num_draft_tokens=0, return_perf_metrics=True)
    assert (reply["total_draft_tokens"], reply["acceptance_rate"]) == (0, 0)
    _, reply = service.generate("abc", 30, return_perf_metrics=True)
    assert reply["total_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("model", NAMES)
def test_a_sampled_text_can_be_had_again_by_the_seed_that_its_reply_names(service, model):
    sampled = {"temperature": 1.0, "top_p": 0.95}
    _, first = service.generate("again ", 40, model, **sampled)
    _, other = service.generate("again ", 40, model, **sampled)
    assert other["text_output"] != first["text_output"]
    for option in ({}, {"num_draft_tokens": 0}):
        _, again = service.generate("again ", 40, model, **sampled, seed=first["seed"], **option)
        assert again == first


def test_stop_words_end_the_text(service, reference_text):
    whole = reference_text("tell me ", 40)
    word = whole[10:13]
    _, reply = service.generate(
        "tell me ", 40, exclude_input_in_output=True, stop_words=["never\n", word]
    )
    assert reply["finish_reason"] == "stop_words"
    assert whole.startswith(reply["text_output"].removesuffix(word))


def test_generate_stream_sends_deltas_that_make_up_the_text(service, reference_text):
    body = {"text_input": "once ", "max_tokens": 30, "stream": True, "end_id": -1, "id": "tale"}
    _, text = service.post("/v2/models/ensemble/generate_stream", body)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == reference_text("once ", 30)
    assert len(events) > 2
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + [
        "length"
    ]
    assert {event["id"] for event in events} == {"tale"}


async def stream_texts(service, requests):
    """Return the texts, responses and finals by id of requests that share one gRPC stream."""
    texts, finals = Counter(), Counter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        for request in requests:
            await call.write(request)
        await call.done_writing()
        async for message in call:
            assert not message.error_message, message.error_message
            response = message.infer_response
            texts.setdefault(response.id, "")
            texts[response.id] += text_of(response)
            finals[response.id] += response.parameters["triton_final_response"].bool_param
    return texts, finals


def test_64_concurrent_streams_keep_their_texts_apart(service, reference_text):
    prompts = {f"r{i}": f"prompt {i:02d}" for i in range(64)}

    async def run():
        requests = [
            infer_request(
                NAMES[i % 2], name, text_input=prompt, max_tokens=40, stream=True, end_id=-1
            )
            for i, (name, prompt) in enumerate(prompts.items())
        ]
        return await asyncio.gather(*(stream_texts(service, requests[i::4]) for i in range(4)))

    results = asyncio.run(run())
    texts = {name: text for part, _ in results for name, text in part.items()}
    assert texts == {name: reference_text(prompt, 40) for name, prompt in prompts.items()}
    assert len(set(texts.values())) == 64
    assert all(count == 1 for _, finals in results for count in finals.values())


async def cancelled_stream(service, index):
    """Start a long request, cancel it after its first response and return the status that the
    client saw.
    """
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(
            infer_request(
                NAMES[index % 2],
                f"c{index}",
                text_input=f"cancel {index}",
                max_tokens=1000,
                stream=True,
                end_id=-1,
            )
        )
        await call.read()
        call.cancel()
        try:
            await call.read()
        except asyncio.CancelledError:
            return grpc.StatusCode.CANCELLED
        return await call.code()


async def burst(service):
    """Send 400 requests on 8 streams along with 100 that are cancelled; return the finals and
    statuses.
    """
    requests = [
        infer_request(
            NAMES[i % 2],
            f"b{i}",
            text_input=f"burst {i}",
            max_tokens=8 + i % 5,
            stream=i % 2 == 0,
            end_id=-1,
        )
        for i in range(400)
    ]
    kept = asyncio.gather(*(stream_texts(service, requests[i::8]) for i in range(8)))
    gone = asyncio.gather(*(cancelled_stream(service, i) for i in range(100)))
    finals = Counter()
    for _, counts in await kept:
        finals.update(counts)
    return finals, await gone


def unless_triton_aborts(service, attempt):
    """Return what an attempt does; once more where gRPC inside Triton 2.51 has aborted (seldom)."""
    try:
        return attempt()
    except (grpc.RpcError, OSError):
        if "ASSERTION FAILED: prior > 0" not in service.log.read_text(errors="replace"):
            raise
        service.wait_ready(2)
        return attempt()


@pytest.mark.slow
def test_a_burst_with_cancellations_answers_every_request_once(start_service):
    service = start_service().wait_ready()
    finals, gone = unless_triton_aborts(service, lambda: asyncio.run(burst(service)))
    assert finals == {f"b{i}": 1 for i in range(400)}
    assert gone == [grpc.StatusCode.CANCELLED] * 100
    counted = {"success": 400, "cancelled": 100}
    service.wait_until(
        lambda: (
            {name: service.metric("spindle_requests_total", outcome=name) for name in counted}
            == counted
        )
    )
    health = service.health()
    assert (health["active"], health["waiting"]) == (0, 0)


BAD = [
    ({"text_input": ""}, "text_input must not be empty"),
    ({"temprature": 0.5}, "temprature is not an input: did you mean temperature?"),
    (
        {"logit_bias_ids": [300], "logit_bias_values": [1]},
        "logit_bias_ids must contain token ids below 257, got 300",
    ),
    ({"max_tokens": 100000}, "max_tokens 100000"),
    ({"end_id": 100000}, "end_id .*100000"),
]
"""``tests.unit.test_codec`` has the other refusals of the same code."""


def test_bad_inputs_get_errors_that_name_them_while_a_stream_goes_on(service, reference_text):
    with service.streaming("go on ", 500) as finish:
        for change, words in BAD:
            body = {"text_input": "a", "max_tokens": 4, "end_id": -1, **change}
            status, text = service.post("/v2/models/ensemble/generate", body)
            assert status in (400, 500), text
            assert re.search(words, json.loads(text)["error"]), text
        status, text = service.post(
            "/v2/models/ensemble/generate", b'{"text_input": "a\xff", "max_tokens": 4}'
        )
        assert status == 400
        assert "text_input is not valid UTF-8" in text
        status, text = service.post("/v2/models/ensemble/generate", {"text_input": "a"})
        assert status == 400
        assert "max_tokens" in text
        assert finish() == reference_text("go on ", 500)


def test_metrics_count_the_steps(service):
    before = service.metric("spindle_emitted_tokens_total")
    service.generate("count ", 50)
    service.wait_until(lambda: service.metric("spindle_emitted_tokens_total") >= before + 50, 5)
    assert service.metric("spindle_step_seconds_count") > 0
    for draft in ("good", "poor"):  # the policy may want only one of them

        def drafted(by="", draft=draft):
            return service.metric(f"spindle_draft_tokens{by}_total", draft=draft)

        # Positions count what was proposed; the trim verifies a part of it.
        service.wait_until(lambda drafted=drafted: drafted() <= drafted("_by_position"), 5)
        assert service.metric("spindle_accepted_tokens_total", draft=draft) <= drafted()
    accepted, drafted = map(
        service.metric, ("spindle_accepted_tokens_total", "spindle_draft_tokens_total")
    )
    assert 0 < accepted < drafted
