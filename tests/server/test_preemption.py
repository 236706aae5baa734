"""Streams on a KV cache that holds three of their lives: some pause and go on, and no text
changes.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from backend.sequence import BLOCK_TOKENS
from tests.server.harness import infer_request, text_of

BLOCKS = 32


@pytest.fixture(scope="module")
def cramped(start_service, tmp_path_factory):
    config = tmp_path_factory.mktemp("cramped") / "serving.json"
    draft = {"name": "good", "engine": "tests.fakes.fake", "options": {"agreement": 0.8}}
    settings = {
        "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.001}},
        "drafts": [draft],
        "policy": {"kind": "random"},
    }
    config.write_text(
        json.dumps({**settings, "limits": {"kv_cache_tokens": BLOCK_TOKENS * BLOCKS}})
    )
    return start_service(config).wait_ready()


def test_streams_pause_and_go_on_with_their_own_text(cramped, reference_text):
    prompts = [f"stream {i}: " for i in range(12)]

    def stream(prompt):
        request = infer_request(
            "ensemble", text_input=prompt, max_tokens=300, stream=True, end_id=-1, empty_final=False
        )
        with cramped.stub() as stub:
            try:
                responses = list(stub.ModelStreamInfer(iter([request]), timeout=60))
            except grpc.RpcError as error:
                log = cramped.log.read_text()[-4000:]
                pytest.fail(f"{error.code()}, {cramped.health()}\n{log}")
        assert not any(response.error_message for response in responses)
        return "".join(text_of(response.infer_response) for response in responses)

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(stream, prompts))
    assert texts == [reference_text(prompt, 300) for prompt in prompts]
    cramped.wait_until(lambda: cramped.metric("spindle_preemptions_total") > 0, 5)
    cramped.wait_until(lambda: cramped.metric("spindle_kv_blocks", state="free") == BLOCKS, 5)
    assert cramped.metric("spindle_kv_blocks", state="used") == 0
