import json
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.server.harness import CONFIG, infer_request, text_of


@pytest.fixture(scope="module")
def one_to_one(start_service, tmp_path_factory):
    """A service whose models are not decoupled."""
    config = tmp_path_factory.mktemp("one_to_one") / "serving.json"
    settings = {
        "triton": {"decoupled_mode": False, "max_batch_size": 8},
        "limits": {"max_request_s": 2},
    }
    config.write_text(json.dumps({**json.loads(CONFIG.read_text()), **settings}))
    return start_service(config).wait_ready()


def test_concurrent_unary_requests_share_the_batch(one_to_one, reference_text):
    prompts = [f"unary {i}" for i in range(16)]
    with one_to_one.stub() as stub, ThreadPoolExecutor(16) as pool:
        requests = [
            infer_request(
                "ensemble", text_input=prompt, max_tokens=30, end_id=-1, empty_final=False
            )
            for prompt in prompts
        ]
        replies = list(pool.map(stub.ModelInfer, requests))
    assert [text_of(reply) for reply in replies] == [
        prompt + reference_text(prompt, 30) for prompt in prompts
    ]
    one_to_one.wait_until(
        lambda: (
            one_to_one.metric("spindle_batch_size_bucket", le="4")
            < one_to_one.metric("spindle_batch_size_count")
        ),
        5,
    )


def test_http_infer_works(one_to_one, reference_text):
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["plain "]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [10]},
        {"name": "end_id", "datatype": "INT32", "shape": [1, 1], "data": [-1]},
    ]
    status, text = one_to_one.post("/v2/models/tensorrt_llm_bls/infer", {"inputs": inputs})
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    assert status == 200
    assert outputs == {
        "text_output": ["plain " + reference_text("plain ", 10)],
        "finish_reason": ["length"],
    }


def test_streaming_is_refused(one_to_one):
    status, reply = one_to_one.generate("a", 4, stream=True)
    assert status == 400
    assert "Streaming is only supported in decoupled mode." in reply["error"]


def active(service):
    return service.health()["active"]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_unary_call_that_is_given_up_frees_its_place(one_to_one, how):
    before = one_to_one.metric("spindle_requests_total", outcome="cancelled")
    with one_to_one.stub() as stub:
        request = infer_request(
            "ensemble", text_input="unary ", max_tokens=2000, end_id=-1, empty_final=False
        )
        call = stub.ModelInfer.future(request, timeout=0.5 if how == "timeout" else None)
        one_to_one.wait_until(lambda: active(one_to_one) == 1, 5)
        if how == "cancel":
            call.cancel()
        one_to_one.wait_until(lambda: active(one_to_one) == 0, 1.5)  # its deadline is 2 s
    one_to_one.wait_until(
        lambda: one_to_one.metric("spindle_requests_total", outcome="cancelled") == before + 1, 5
    )


def test_a_request_that_lives_too_long_is_ended(one_to_one):
    request = infer_request(
        "ensemble", text_input="never ends ", max_tokens=2000, end_id=-1, empty_final=False
    )
    with (
        one_to_one.stub() as stub,
        pytest.raises(grpc.RpcError, match=r"limits.max_request_s, 2 s") as error,
    ):
        stub.ModelInfer(request)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    one_to_one.wait_until(
        lambda: one_to_one.metric("spindle_fallback_total", reason="deadline") > 0, 5
    )


@pytest.mark.parametrize("path", ["generate", "infer"])
def test_triton_2_51_does_not_see_a_plain_http_client_go_so_the_deadline_ends_its_request(
    one_to_one, path
):
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["plain "]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2000]},
        {"name": "end_id", "datatype": "INT32", "shape": [1, 1], "data": [-1]},
    ]
    body = json.dumps(
        {"inputs": inputs}
        if path == "infer"
        else {"text_input": "plain ", "max_tokens": 2000, "end_id": -1}
    ).encode()
    ended = one_to_one.metric("spindle_requests_total", outcome="unavailable")
    with socket.create_connection(("127.0.0.1", one_to_one.http)) as connection:
        connection.sendall(
            f"POST /v2/models/ensemble/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: "
            f"{len(body)}\r\n\r\n".encode()
            + body
        )
        one_to_one.wait_until(lambda: active(one_to_one) == 1, 5)
    one_to_one.wait_until(lambda: active(one_to_one) == 0, 5)
    one_to_one.wait_until(
        lambda: one_to_one.metric("spindle_requests_total", outcome="unavailable") == ended + 1, 5
    )
