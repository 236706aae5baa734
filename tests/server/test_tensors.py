"""The contract of tensors beyond one text in and one text out, through the real
tritonserver by its own client.
"""

import math
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from backend.sequence import BLOCK_TOKENS
from backend.triton_adapter.fields import MODELS, TOKEN_INPUTS
from tests.server.tensors import END, connected, ids_of, tensors, token_request

SIZES = {-1: 2}
ONES = {"STRING": "x", "BOOL": True, "FP16": 0.5, "FP32": 0.5}
TOGETHER = {
    "embedding_bias_words": {"embedding_bias_weights": [[0.5, 0.5]]},
    "embedding_bias_weights": {"embedding_bias_words": [["x", "y"]]},
    "logit_bias_ids": {"logit_bias_values": [[0.5, 0.5]]},
    "logit_bias_values": {"logit_bias_ids": [[2, 3]]},
    "prompt_token_ids": {"text_input": [[""]]},
    "guided_decoding_guide_type": {"guided_decoding_guide": [["[xy]+"]], "end_id": [[256]]},
    "guided_decoding_guide": {"guided_decoding_guide_type": [["regex"]], "end_id": [[256]]},
}
SAMPLES = {
    "embedding_bias": [[0.5] * 257],
    "guided_decoding_guide_type": [["regex"]],
    "stop": [[False]],
    "stop_words_list": [[[1, 2], [1, 2]]],
    "bad_words_list": [[[1, 2], [1, 2]]],
    "input_lengths": [[2]],
    "resumed_tokens": [[1]],
}
TENSORS = [(model, field) for model in MODELS[:3] for field in model.inputs]


def sample(field):
    """Return a value of a tensor that asks for something, nested by its dims."""
    value = ONES.get(field.dtype, 2)
    for size in reversed(field.dims):
        value = [value] * SIZES.get(size, size)
    return SAMPLES.get(field.name, [value])


def together(model, field):
    """Return the inputs that a tensor needs with it."""
    if field.name == "resumed_tokens" and model.name != "tensorrt_llm":
        return {"text_input": [[""]], "prompt_token_ids": [[97, 98]]}
    return TOGETHER.get(field.name, {})


def smallest(model):
    """Return the required inputs of a model."""
    if model.name == "tensorrt_llm":
        return token_request("ab", 4)
    return {"text_input": [["ab"]], "max_tokens": [[4]], **END}


@pytest.mark.parametrize(("model", "field"), TENSORS, ids=lambda part: part.name)
def test_every_tensor_is_taken_or_refused_by_name_and_reason_over_grpc(
    client, refused, model, field
):
    inputs = {**smallest(model), **together(model, field), field.name: sample(field)}
    if reason := refused.get(field.name):
        with pytest.raises(
            InferenceServerException, match=f"{field.name} is not supported: {reason}"
        ):
            client.ask(model.name, **inputs)
        return
    if field.refused is None:
        assert client.ask(model.name, **inputs)[-1]["finish_reason"].item() in (
            b"length",
            b"end_id",
            b"stop_words",
        )
        return
    with pytest.raises(
        InferenceServerException, match=f"{field.name} is not supported: {field.refused.value}"
    ):
        client.ask(model.name, **inputs)


@pytest.mark.parametrize(
    ("model", "field"),
    [each for each in TENSORS if len(each[1].dims) == 1],
    ids=lambda part: part.name,
)
def test_every_tensor_of_one_dimension_is_taken_or_refused_over_http(
    service, refused, model, field
):
    """Triton's generate interfaces carry no others."""
    inputs = {**smallest(model), **together(model, field), field.name: sample(field)}
    body = {name: row[0] if len(row) == 1 else row for name, (row,) in inputs.items()}
    _, text = service.post(f"/v2/models/{model.name}/generate_stream", body)
    if reason := refused.get(field.name):
        assert f"{field.name} is not supported: {reason}" in text
    elif field.refused is None:
        assert '"finish_reason":"' in text
        assert "error" not in text
    else:
        assert f"{field.name} is not supported: {field.refused.value}" in text


@pytest.mark.parametrize("streaming", [False, True])
def test_token_ids_in_token_ids_out(client, reference_text, streaming):
    flags = {"streaming": [[streaming]], "return_num_output_tokens": [[True]]}
    responses = client.ask("tensorrt_llm", **token_request("tokens ", 30, **flags))
    expected = reference_text("tokens ", 30)
    assert bytes(ids_of(responses)).decode() == ("" if streaming else "tokens ") + expected
    assert (len(responses) > 3) == streaming
    for response in responses:
        assert (response["output_ids"].dtype, response["output_ids"].shape[:2]) == (
            np.int32,
            (1, 1),
        )
        assert response["sequence_length"].tolist() == [[response["output_ids"].shape[2]]]
    assert responses[-1]["num_output_tokens"].tolist() == [[30]]
    assert responses[-1]["finish_reason"].tolist() == [[b"length"]]


def test_the_prompt_may_be_left_out_of_the_tokens_and_stop_words_be_ids(client, reference_text):
    expected = reference_text("tokens ", 40)
    word = expected[10:13]
    end = expected.index(word) + 3
    options = {
        "exclude_input_in_output": [[True]],
        "stop_words_list": [[list(word.encode()), [3, -1, -1]]],
    }
    responses = client.ask("tensorrt_llm", **token_request("tokens ", 40, **options))
    assert bytes(ids_of(responses)).decode() == expected[:end]
    assert responses[-1]["finish_reason"].tolist() == [[b"stop_words"]]


def test_bad_words_and_bias_by_ids_mean_what_they_mean_as_words(client, service):
    words = {"bad_words": ["ab"], "embedding_bias_words": ["q"], "embedding_bias_weights": [3.0]}
    _, reply = service.generate("change ", 40, exclude_input_in_output=True, **words)
    bias = [0.0] * 257
    bias[ord("q")] = 3.0
    options = {
        "bad_words_list": [[[ord("a"), ord("b")], [2, -1]]],
        "embedding_bias": [bias],
        "exclude_input_in_output": [[True]],
    }
    assert (
        bytes(
            ids_of(client.ask("tensorrt_llm", **token_request("change ", 40, **options)))
        ).decode()
        == reply["text_output"]
    )


@pytest.mark.parametrize("size", [1, 2, 256])
@pytest.mark.parametrize("last", [0.0, 1.0])
def test_a_bias_that_is_not_of_every_token_is_refused(client, size, last):
    inputs = token_request("abc", 4, embedding_bias=[[0.0] * (size - 1) + [last]])
    with pytest.raises(
        InferenceServerException,
        match=f"embedding_bias must have 257 numbers, one for every token, got {size}",
    ):
        client.ask("tensorrt_llm", **inputs)


def test_a_bias_of_minus_infinity_is_a_ban(client):
    ban = [-math.inf] * 257
    ban[ord("q")] = 0.0
    responses = client.ask("tensorrt_llm", **token_request("abc", 4, embedding_bias=[ban]))
    assert bytes(ids_of(responses)).endswith(b"qqqq")
    banned = [token for token in range(257) if token != ord("q")]
    bias = {"logit_bias_ids": [banned], "logit_bias_values": [[-math.inf] * 256]}
    responses = client.ask("ensemble", text_input=[["abc"]], max_tokens=[[4]], **bias)
    assert responses[-1]["text_output"].item().endswith(b"qqqq")
    with pytest.raises(InferenceServerException, match="or -inf: a ban, got inf"):
        client.ask("tensorrt_llm", **token_request("abc", 4, embedding_bias=[[math.inf] * 257]))


def test_ids_beyond_the_vocabulary_are_refused_by_tensor_and_id(client):
    for change in (
        {"input_ids": [[1, 2, 999]]},
        {"bad_words_list": [[[999], [1]]]},
        {"embedding_bias": [[0.0] * 999 + [1.0]]},
    ):
        with pytest.raises(
            InferenceServerException,
            match=f"{next(iter(change))} must contain token ids below 257, got 999",
        ):
            client.ask("tensorrt_llm", **(token_request("abc", 4) | change))


@pytest.mark.parametrize("stream", [False, True])
def test_a_triton_batch_and_several_texts_come_by_their_indices_and_end_once(
    client, reference_text, stream
):
    prompts = ["one ", "two "]
    inputs = {
        "text_input": [[p] for p in prompts],
        "max_tokens": [[12], [20]],
        "end_id": [[-1]] * 2,
        "stream": [[stream]] * 2,
    }
    flags = {"num_return_sequences": [[3]] * 2, "exclude_input_in_output": [[True]] * 2}
    texts = {}
    for response in client.ask("ensemble", **inputs, **flags):
        key = (response["batch_index"].item(), response["sequence_index"].item())
        texts[key] = texts.get(key, "") + response["text_output"].item().decode()
    expected = [reference_text("one ", 12), reference_text("two ", 20)]
    assert texts == {(row, index): expected[row] for row in range(2) for index in range(3)}


@pytest.mark.parametrize("given", [{"seed": [[40]]}, {}], ids=["seeded", "sampled"])
def test_several_sampled_texts_differ_and_each_names_its_seed(client, given):
    sampled = {"text_input": [["sample "]], "max_tokens": [[30]], **END, "temperature": [[1.0]]}
    responses = client.ask("tensorrt_llm_bls", **sampled, **given, num_return_sequences=[[3]])
    texts = {response["seed"].item(): response["text_output"].item() for response in responses}
    assert len(set(texts.values())) == 3
    if given:
        seeds = {
            response["sequence_index"].item(): response["seed"].item() for response in responses
        }
        assert seeds == {0: 40, 1: 41, 2: 42}
    for seed, text in texts.items():
        (alone,) = client.ask("tensorrt_llm_bls", **sampled, seed=[[seed]])
        assert (alone["text_output"].item(), alone["seed"].item()) == (text, seed)
        assert not {"sequence_index", "batch_index"} & set(alone)


def test_a_bad_element_of_a_batch_ends_the_whole_request_by_one_error(client, service):
    with pytest.raises(InferenceServerException, match=r"max_tokens 100000 and a prompt"):
        client.ask(
            "ensemble", text_input=[["a"], ["b"]], max_tokens=[[1500], [100000]], end_id=[[-1]] * 2
        )
    service.wait_until(lambda: service.health()["active"] == 0, 3)
    assert len(client.ask("ensemble", text_input=[["a"]], max_tokens=[[4]], **END)) == 1


def test_performance_outputs_are_in_order_and_count_the_blocks(client):
    before_ns = time.monotonic_ns()
    inputs = {
        "text_input": [["perf " * 40]],
        "max_tokens": [[40]],
        **END,
        "return_perf_metrics": [[True]],
        "cache_salt": [["perf"]],
    }
    outputs = {
        name: value.ravel()[0] for name, value in client.ask("ensemble", **inputs)[0].items()
    }
    names = (
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
    )
    times = [before_ns, *(outputs[name] for name in names), time.monotonic_ns()]
    assert times == sorted(times)
    assert outputs["first_token_time_ns"] < outputs["last_token_time_ns"]
    assert outputs["kv_cache_reused_blocks"] == 0
    blocks = 240 / BLOCK_TOKENS
    assert blocks <= outputs["kv_cache_alloc_new_blocks"] <= blocks + 2
    again = {name: value.ravel()[0] for name, value in client.ask("ensemble", **inputs)[0].items()}
    assert again["kv_cache_reused_blocks"] == 6
    assert again["kv_cache_alloc_total_blocks"] == again["kv_cache_alloc_new_blocks"] + 6


def test_a_stop_request_ends_the_request_with_its_id(client, service):
    client.send("tensorrt_llm", "long", **token_request("go on ", 1500, streaming=[[True]]))
    service.wait_until(lambda: service.health()["active"] == 1, 5)
    with connected(service) as other:
        other.send("tensorrt_llm", "long", **token_request("x", 1, stop=[[True]]))
        assert other.collect("long") == []
    assert len(ids_of(client.collect("long"))) < 1500
    service.wait_until(lambda: service.health()["active"] == 0, 3)


def test_a_stop_request_needs_an_id(client):
    with pytest.raises(
        InferenceServerException, match="A request id must be provided for request cancellation"
    ):
        client.ask("tensorrt_llm", **token_request("x", 1, stop=[[True]]))


def test_a_request_may_bring_its_own_timeout(client):
    client.send("ensemble", timeout=300_000, text_input=[["late "]], max_tokens=[[1500]], **END)
    with pytest.raises(
        InferenceServerException, match=r"the request has not ended within its timeout, 0.3 s"
    ):
        client.collect()


def test_token_ids_over_http(service, reference_text):
    body = {"input_ids": list(b"web "), "input_lengths": 4, "request_output_len": 10, "end_id": -1}
    status, text = service.post("/v2/models/tensorrt_llm/generate", body)
    assert status == 200, text
    with httpclient.InferenceServerClient(f"127.0.0.1:{service.http}") as http:
        assert {tensor["name"] for tensor in http.get_model_metadata("tensorrt_llm")["inputs"]} == {
            f.name for f in TOKEN_INPUTS
        }
    import json

    assert bytes(json.loads(text)["output_ids"]).decode() == "web " + reference_text("web ", 10)


@pytest.fixture
def infer(service):
    """Call a model over HTTP or gRPC and return its outputs."""
    with (
        grpcclient.InferenceServerClient(f"127.0.0.1:{service.grpc}") as grpc,
        httpclient.InferenceServerClient(f"127.0.0.1:{service.http}") as http,
    ):

        def call(model, over="grpc", **inputs):
            client, kind = {"grpc": (grpc, grpcclient), "http": (http, httpclient)}[over]
            result = client.infer(model, tensors(inputs, kind))
            response = result.get_response()
            names = (
                [o["name"] for o in response["outputs"]]
                if over == "http"
                else [o.name for o in response.outputs]
            )
            return {name: result.as_numpy(name) for name in names}

        yield call


@pytest.mark.parametrize("over", ["grpc", "http"])
def test_the_three_models_in_a_row_do_what_the_ensemble_does(infer, client, service, over):
    words = {"STOP_WORDS_DICT": [["~~"], ["x"]], "BAD_WORDS_DICT": [["ab", ""], ["c", ""]]}
    bias = {"EMBEDDING_BIAS_WORDS": [["q"], ["zz"]], "EMBEDDING_BIAS_WEIGHTS": [[3.0], [0.5]]}
    texts = {
        "QUERY": [["first "], ["second text "]],
        "REQUEST_OUTPUT_LEN": [[20], [20]],
        "END_ID": [[-1], [-1]],
    }
    made = infer("preprocessing", over, **texts, **words, **bias)
    assert made["REQUEST_INPUT_LEN"].tolist() == [[6], [12]]
    assert made["BAD_WORDS_IDS"].tolist() == [[[97, 98], [2, -1]], [[99, 0], [1, -1]]]
    assert made["EMBEDDING_BIAS"].shape == (2, 257)
    assert (made["EMBEDDING_BIAS"][0, ord("q")], made["EMBEDDING_BIAS"][1, ord("z")]) == (3.0, 1.0)
    for row, prompt in enumerate(["first ", "second text "]):
        inputs = {
            "input_ids": made["INPUT_ID"],
            "input_lengths": made["REQUEST_INPUT_LEN"],
            "request_output_len": made["REQUEST_OUTPUT_LEN"],
            "decoder_input_ids": made["DECODER_INPUT_ID"],
            "decoder_input_lengths": made["REQUEST_DECODER_INPUT_LEN"],
            "bad_words_list": made["BAD_WORDS_IDS"],
            "stop_words_list": made["STOP_WORDS_IDS"],
            "embedding_bias": made["EMBEDDING_BIAS"],
            "end_id": made["OUT_END_ID"],
            "pad_id": [[0], [0]],
        }
        (response,) = client.ask(
            "tensorrt_llm", **{name: value[row : row + 1] for name, value in inputs.items()}
        )
        (text,) = infer(
            "postprocessing",
            over,
            TOKENS_BATCH=response["output_ids"],
            SEQUENCE_LENGTH=response["sequence_length"],
        )["OUTPUT"].flatten()
        options = {
            "stop_words": words["STOP_WORDS_DICT"][row],
            "bad_words": words["BAD_WORDS_DICT"][row],
        }
        options |= {
            "embedding_bias_words": bias["EMBEDDING_BIAS_WORDS"][row],
            "embedding_bias_weights": bias["EMBEDDING_BIAS_WEIGHTS"][row],
        }
        _, reply = service.generate(prompt, 20, **options)
        # tokens have the stop word that ended them
        assert text.decode().removesuffix("x") == reply["text_output"]


def test_without_words_preprocessing_gives_lists_that_ask_for_nothing(infer):
    made = infer("preprocessing", QUERY=[["a"]], REQUEST_OUTPUT_LEN=[[7]])
    assert {
        name: made[name].shape for name in ("BAD_WORDS_IDS", "STOP_WORDS_IDS", "EMBEDDING_BIAS")
    } == {
        "BAD_WORDS_IDS": (1, 2, 0),
        "STOP_WORDS_IDS": (1, 2, 0),
        "EMBEDDING_BIAS": (1, 0),
    }
    assert (made["OUT_END_ID"].item(), made["REQUEST_OUTPUT_LEN"].item()) == (256, 7)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (
            "preprocessing",
            {"QUERY": [["a"]], "REQUEST_OUTPUT_LEN": [[1]], "IMAGE_URL": [["u"]]},
            "IMAGE_URL is not supported: Spindle takes no images",
        ),
        (
            "preprocessing",
            {"QUERY": [[b"\xff"]], "REQUEST_OUTPUT_LEN": [[1]]},
            "QUERY is not valid UTF-8",
        ),
        (
            "preprocessing",
            {"QUERY": [["a"]], "REQUEST_OUTPUT_LEN": [[1]], "EMBEDDING_BIAS_WORDS": [["a"]]},
            "EMBEDDING_BIAS_WEIGHTS",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": [[[1, 2]]], "SEQUENCE_LENGTH": [[3]]},
            "SEQUENCE_LENGTH .*at most 2",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": [[[1, -2]]], "SEQUENCE_LENGTH": [[2]]},
            "TOKENS_BATCH must contain token ids below 257, got -2",
        ),
    ],
)
def test_what_the_tokenizer_models_cannot_read_is_named(infer, model, inputs, words):
    with pytest.raises(InferenceServerException, match=words):
        infer(model, **inputs)


def test_special_tokens_are_no_text_and_ids_beyond_the_vocabulary_are_refused(infer):
    made = infer("postprocessing", TOKENS_BATCH=[[[97, 256, 98, 999]]], SEQUENCE_LENGTH=[[3]])
    assert made["OUTPUT"].tolist() == [[b"ab"]]
    with pytest.raises(
        InferenceServerException, match="TOKENS_BATCH must contain token ids below 257, got 999"
    ):
        infer("postprocessing", TOKENS_BATCH=[[[97, 999]]], SEQUENCE_LENGTH=[[2]])
