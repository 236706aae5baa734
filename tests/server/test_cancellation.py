"""A client that goes, by whatever route and at whatever stage, ends its own request and frees its
place; no other request notices.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.server.harness import endless, text_of

LONG = 1500
STAGES = ("queued", "prefill", "decode")


@pytest.fixture(scope="module")
def narrow(start_service, tmp_path_factory):
    """A service of two places, where a long prompt takes seconds to enter and a long text many more
    to write.
    """
    config = tmp_path_factory.mktemp("narrow") / "serving.json"
    limits = {"max_active_requests": 2, "prefill_chunk_tokens": 4}
    config.write_text(
        json.dumps(
            {
                "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.01}},
                "policy": {"kind": "none"},
                "limits": limits,
            }
        )
    )
    return start_service(config).wait_ready()


def counts(service):
    health = service.health()
    return health["active"], health["waiting"]


@contextmanager
def both_places_taken(service):
    with service.stub() as stub:
        request = endless("holds its place ", LONG)
        calls = [stub.ModelStreamInfer(iter([request])) for _ in range(2)]
        for call in calls:
            next(call)
        yield calls
        for call in calls:
            assert text_of(next(call).infer_response)  # it never stopped
            call.cancel()
    service.wait_until(lambda: counts(service) == (0, 0), 5)


def tensors(text, max_tokens, stream=True):
    def tensor(name, dtype, value):
        made = triton.InferInput(name, [1, 1], dtype)
        made.set_data_from_numpy(value)
        return made

    return [
        tensor("text_input", "BYTES", np.array([[text.encode()]], np.object_)),
        tensor("max_tokens", "INT32", np.array([[max_tokens]], np.int32)),
        tensor("end_id", "INT32", np.array([[-1]], np.int32)),
        tensor("stream", "BOOL", np.array([[stream]])),
    ]


@contextmanager
def sync_stream(service, text):
    with triton.InferenceServerClient(f"127.0.0.1:{service.grpc}") as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", tensors(text, LONG))
        yield
        client.stop_stream(cancel_requests=True)


@contextmanager
def aio_stream(service, text):
    loop = asyncio.new_event_loop()

    async def inputs():
        yield {"model_name": "tensorrt_llm_bls", "inputs": tensors(text, LONG)}
        await asyncio.Event().wait()  # an iterator that ends half-closes the stream

    async def begin():
        client = triton_aio.InferenceServerClient(f"127.0.0.1:{service.grpc}")
        responses = client.stream_infer(inputs())
        return client, responses, asyncio.ensure_future(anext(responses))

    async def leave(client, responses, first):
        responses.cancel()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await client.close()

    try:
        parts = loop.run_until_complete(begin())
        loop.run_until_complete(asyncio.sleep(0.05))  # lets the request out
        yield
        loop.run_until_complete(leave(*parts))
    finally:
        loop.close()


KILLED = """
import sys, grpc
from tritonclient.grpc import service_pb2_grpc
from tests.server.harness import infer_request
port, text = sys.argv[1:]
stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel("127.0.0.1:" + port))
options = dict(max_tokens=1500, stream=True, end_id=-1)
request = infer_request("ensemble", text_input=text, **options)
list(stub.ModelStreamInfer(iter([request])))
"""


@contextmanager
def killed_client(service, text):
    client = subprocess.Popen([sys.executable, "-c", KILLED, str(service.grpc), text])
    yield
    client.send_signal(signal.SIGKILL)
    client.wait()


@contextmanager
def http_stream(service, text):
    body = json.dumps(
        {"text_input": text, "max_tokens": LONG, "stream": True, "end_id": -1}
    ).encode()
    head = (
        f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", service.http)) as connection:
        connection.sendall(head + body)
        yield connection


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", [sync_stream, aio_stream, killed_client])
def test_a_grpc_client_that_goes_frees_its_place(narrow, route, stage):
    if stage == "queued":
        with both_places_taken(narrow):
            with route(narrow, "victim "):
                narrow.wait_until(lambda: counts(narrow) == (2, 1), 10)
            narrow.wait_until(lambda: counts(narrow) == (2, 0), 5)
        return
    emitted = narrow.metric("spindle_emitted_tokens_total")
    with route(narrow, "x" * 400 if stage == "prefill" else "victim "):
        narrow.wait_until(lambda: counts(narrow) == (1, 0), 10)
        if stage == "decode":
            narrow.wait_until(lambda: narrow.metric("spindle_emitted_tokens_total") > emitted, 10)
    narrow.wait_until(lambda: counts(narrow) == (0, 0), 5)


def test_an_http_stream_that_hangs_up_frees_its_place(narrow):
    with http_stream(narrow, "victim ") as connection, connection.makefile("rb") as lines:
        assert any(line.startswith(b"data:") for line in lines)
        assert counts(narrow) == (1, 0)
    narrow.wait_until(lambda: counts(narrow) == (0, 0), 5)


def test_triton_2_51_sees_an_http_stream_hang_up_at_its_first_event_only(narrow):
    with both_places_taken(narrow) as calls:
        with http_stream(narrow, "victim "):
            narrow.wait_until(lambda: counts(narrow) == (2, 1), 10)
        calls.pop().cancel()
        narrow.wait_until(
            lambda: counts(narrow) == (1, 0), 5
        )  # the victim took the place, wrote a token, and was gone
