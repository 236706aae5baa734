import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.harness import CONFIG, infer_request, text_of


@pytest.fixture(scope="module")
def one_to_one(start_service, tmp_path_factory):
    """A service whose models are not decoupled."""
    config = tmp_path_factory.mktemp("one_to_one") / "serving.json"
    config.write_text(json.dumps({**json.loads(CONFIG.read_text()), "triton": {"decoupled_mode": False, "max_batch_size": 8}}))
    return start_service(config).wait_ready()


def test_concurrent_unary_requests_share_the_batch(one_to_one, reference_text):
    prompts = [f"unary {i}" for i in range(16)]
    with one_to_one.stub() as stub, ThreadPoolExecutor(16) as pool:
        requests = [infer_request("ensemble", text_input=prompt, max_tokens=30, end_id=-1, empty_final=False) for prompt in prompts]
        replies = list(pool.map(stub.ModelInfer, requests))
    assert [text_of(reply) for reply in replies] == [prompt + reference_text(prompt, 30) for prompt in prompts]
    one_to_one.wait_until(lambda: one_to_one.metric("spindle_batch_size_bucket", le="4") < one_to_one.metric("spindle_batch_size_count"), 5)


def test_http_infer_works(one_to_one, reference_text):
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["plain "]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [10]},
        {"name": "end_id", "datatype": "INT32", "shape": [1, 1], "data": [-1]},
    ]
    status, text = one_to_one.post("/v2/models/tensorrt_llm_bls/infer", {"inputs": inputs})
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    assert status == 200
    assert outputs == {"text_output": ["plain " + reference_text("plain ", 10)], "finish_reason": ["length"]}


def test_streaming_is_refused(one_to_one):
    status, reply = one_to_one.generate("a", 4, stream=True)
    assert status == 400
    assert "Streaming is only supported in decoupled mode." in reply["error"]
