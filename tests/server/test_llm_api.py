"""TensorRT-LLM's LLM API through a real tritonserver, on the fake of its library."""

import json
import socket

import pytest

from tests.fakes.markov import VOCAB_SIZE, MarkovChain

PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def service(start_service, tmp_path_factory):
    """A checkpoint with our drafter."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (folder / "tokenizer.json").write_text("{}")
    spec = {
        "decoding_type": "Spindle",
        "max_draft_len": 4,
        "drafts": [{"engine": "lookup", "name": "lookup"}],
    }
    target = {
        "engine": "tests.contract.fake_llm_kind",
        "name": "llm",
        "model": str(folder),
        "engine_args": {"speculative_config": spec},
    }
    file = folder / "serving.json"
    file.write_text(json.dumps({"target": target, "limits": {"max_active_requests": 4}}))
    return start_service(file).wait_ready()


def chain_text(prompt, tokens, bias=()):
    text = list(prompt.encode())
    for _ in range(tokens):
        text.append(int(_scores(text, bias).argmax()))
    return bytes(text).decode()


def _scores(text, bias):
    scores = MarkovChain().logits(text)
    for token, addend in bias:
        scores[token] += addend
    return scores


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_request_of_nvidia_s_clients_is_answered(service, model):
    status, reply = service.generate(PROMPT, 24, model)
    assert (status, reply["text_output"]) == (200, chain_text(PROMPT, 24))


def test_a_drafter_of_ours_proposes_and_counts_on_the_page(service):
    body = {"embedding_bias_words": ["x"], "embedding_bias_weights": [40.0]}
    status, reply = service.generate(PROMPT, 60, **body)
    assert (status, reply["text_output"]) == (200, PROMPT + "x" * 60)
    service.wait_until(lambda: service.metric("spindle_accepted_tokens_total") > 10, 10)
    assert "lookup" in service.command("explain")[1]


def test_an_option_that_its_sampler_ignores_is_refused_by_name(service):
    status, reply = service.generate(PROMPT, 4, presence_penalty=0.5)
    assert status >= 400
    assert "presence_penalty is not supported" in reply["error"]


def test_a_client_that_hangs_up_frees_its_place(service):
    body = {"text_input": PROMPT, "max_tokens": 2000, "end_id": -1, "stream": True}
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", service.http)) as client:
        client.sendall(
            b"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        assert client.recv(100)
    service.wait_until(lambda: service.health()["active"] == 0)
