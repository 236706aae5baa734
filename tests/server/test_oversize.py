"""Requests that are far too large, by every route: each is refused by name, and none costs another
its engine.
"""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.server.harness import free_ports, write_config
from tests.server.tensors import connected, tensors

MEGABYTES = "1" * 8_000_000
NEARLY_4_MIB = "1" * 3_900_000
BYTES_OVER = "of 8000000 bytes is over the limit of 2047 tokens"
SENTENCE = (
    "This model's maximum context length is 2048 tokens. However, the {} 3900000 bytes, which are "
    "too many for it. Please reduce the length of the {}."
)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def fronted(start_service, tmp_path_factory):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = write_config(tmp_path_factory.mktemp("configuration"), template)
    (port,) = free_ports(1)
    service = start_service(config, OPENAI_PORT=str(port))
    service.wait_ready().wait_for_front_end()
    return service


@pytest.fixture(autouse=True)
def same_engine(fronted):
    """No request here may cost a process its life."""
    before = fronted.health()["pid"]
    yield
    assert fronted.health()["pid"] == before


def post(service, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{service.openai}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_text_to_triton(fronted, model, fields):
    status, answer = fronted.generate(MEGABYTES, 1, model=model, **fields)
    assert status == 400
    assert f"text_input {BYTES_OVER}" in answer["error"]


def test_a_text_to_preprocessing(fronted):
    body = {"QUERY": MEGABYTES, "REQUEST_OUTPUT_LEN": 1}
    status, text = fronted.post("/v2/models/preprocessing/generate", body)
    assert status == 400
    assert f"QUERY {BYTES_OVER}" in text


def test_one_row_of_a_batch(fronted):
    rows = {"text_input": [["a"], [MEGABYTES], ["b"]], "max_tokens": [[1]] * 3}
    refused = pytest.raises(InferenceServerException, match=f"text_input {BYTES_OVER}")
    with connected(fronted) as client, refused:
        client.ask("tensorrt_llm_bls", **rows)


def test_token_ids(fronted):
    ids = np.ones((1, 500_000), np.int32)
    with connected(fronted) as client:
        with pytest.raises(InferenceServerException, match="of 500000 tokens is over the limit"):
            client.ask(
                "tensorrt_llm", input_ids=ids, input_lengths=[[500_000]], request_output_len=[[1]]
            )
        with pytest.raises(InferenceServerException, match="at most 2097152 elements, got 3000000"):
            client.ask(
                "tensorrt_llm",
                input_ids=np.ones((1, 3_000_000), np.int32),
                input_lengths=[[5]],
                request_output_len=[[1]],
            )


def test_ids_to_postprocessing(fronted):
    given = {"TOKENS_BATCH": np.ones((1, 1, 3_000_000), np.int32), "SEQUENCE_LENGTH": [[3_000_000]]}
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{fronted.grpc}")
    with client, pytest.raises(InferenceServerException, match="at most 2097152"):
        client.infer("postprocessing", tensors(given))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_words", ["a"] * 300),
        ("stop_words", ["a" * 2000]),
        ("bad_words", ["bad"] * 100_000),
        ("embedding_bias_words", ["a" * 1000] * 100),
        ("cache_salt", "a" * 5000),
        ("guided_decoding_guide", "a" * 300_000),
    ],
)
def test_other_texts(fronted, field, value):
    more = {"guided_decoding_guide_type": "regex"} if field == "guided_decoding_guide" else {}
    if field == "embedding_bias_words":
        more = {"embedding_bias_weights": [1.0] * len(value)}
    status, answer = fronted.generate("a", 1, **{field: value}, **more)
    assert status == 400
    assert field in answer["error"]


def test_a_request_beyond_a_frame(fronted):
    """Many rows, each of which might fit: the connection to the engine must survive."""
    inputs = tensors({"QUERY": [["a"]], "REQUEST_OUTPUT_LEN": [[1]]})
    words = np.full((1, 2_500_000), b"", np.object_)
    inputs.append(grpcclient.InferInput("STOP_WORDS_DICT", words.shape, "BYTES"))
    inputs[-1].set_data_from_numpy(words)
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{fronted.grpc}")
    with client, pytest.raises(InferenceServerException, match="STOP_WORDS_DICT must have at most"):
        client.infer("preprocessing", inputs)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": NEARLY_4_MIB, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": NEARLY_4_MIB, "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": NEARLY_4_MIB, "echo": True, "max_tokens": 0}, "prompt"),
        ("/v1/completions", {"prompt": ["a", NEARLY_4_MIB, "b"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": NEARLY_4_MIB}]}, "messages"),
        ("/tokenize", {"prompt": NEARLY_4_MIB}, "prompt"),
    ],
)
def test_a_text_to_the_front_end(fronted, path, body, param):
    status, error = post(fronted, path, {"model": "fake", **body})
    verb = "messages have" if param == "messages" else "prompt has"
    assert (status, error["message"]) == (400, SENTENCE.format(verb, param))
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_many_prompts_none_of_which_fits(fronted):
    body = {"model": "fake", "prompt": ["1" * 30_000] * 128}
    status, error = post(fronted, "/v1/completions", body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    fronted.wait_until(lambda: fronted.health()["waiting"] == fronted.health()["active"] == 0)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER] * 50_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]},
        {"messages": [{"role": "user"}] * 100_000},
        {"messages": [USER], "stop": ["a"] * 500_000},
    ],
)
def test_a_chat_of_many_parts(fronted, body):
    status, error = post(fronted, "/v1/chat/completions", {"model": "fake", **body})
    assert status == 400
    assert error["param"]


def test_what_fits_exactly_is_served(fronted):
    status, answer = post(
        fronted, "/v1/completions", {"model": "fake", "prompt": "1" * 2047, "max_tokens": 1}
    )
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2047)
