import json
import math
from pathlib import Path

import numpy as np
import pytest

from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.triton_adapter.codec import Wanted, decode, decode_command, encode_chunk, encode_final
from backend.triton_adapter.fields import MODELS, NUMPY_TYPES, TEXT_INPUTS, TEXT_OUTPUTS, UNSUPPORTED, render_config

DTYPES = {field.name: NUMPY_TYPES[field.dtype] for field in TEXT_INPUTS}
FINAL = {"finish_reason": "length", "num_input_tokens": 3, "num_output_tokens": 7, "draft_tokens": 8, "accepted_draft_tokens": 6}


def tensors(**values):
    """Return input tensors with a batch of one, as Triton hands them over (text as bytes)."""
    arrays = {}
    for name, value in {"text_input": "hi", "max_tokens": 4, **values}.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array([items], dtype=DTYPES[name])
    return arrays


def test_only_the_required_inputs_leave_every_option_unset():
    assert decode(tensors()) == (GenerationRequest("hi", 4), Wanted())


def test_every_input_arrives_in_the_request():
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 2**64 - 1, "end_id": -1, "pad_id": 2, "num_draft_tokens": 0}
    flags = {"stream": True, "exclude_input_in_output": True}
    request, wanted = decode(tensors(**values, **flags, stop_words=["ab", "", "ü"], return_perf_metrics=True, return_num_input_tokens=True))
    assert request == GenerationRequest("hi", 4, stop_words=("ab", "ü"), **values, **flags)
    assert wanted == Wanted(num_input_tokens=True, num_output_tokens=False, perf_metrics=True)
    assert GenerationRequest.from_wire(json.loads(json.dumps(request.to_wire()))) == request


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_input": ""}, ["text_input", "''"]),
        ({"text_input": b"a\xff"}, ["text_input", "UTF-8", "0xff", "offset 1"]),
        ({"stop_words": [b"ok", b"\x80"]}, ["stop_words", "UTF-8", "0x80"]),
        ({"max_tokens": 0}, ["max_tokens", "got 0"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_p": -0.5}, ["top_p", "-0.5"]),
        ({"top_p": math.nan}, ["top_p", "nan"]),
        ({"temperature": -1.0}, ["temperature", "-1"]),
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"temperature": math.inf}, ["temperature", "inf"]),
        ({"top_k": -1}, ["top_k", "-1"]),
        ({"num_draft_tokens": -2}, ["num_draft_tokens", "-2"]),
        ({"max_tokens": [1, 2]}, ["max_tokens", "shape", "[1, 2]"]),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(change, words):
    with pytest.raises(RequestError) as refusal:
        decode(tensors(**change))
    assert refusal.value.code is ErrorCode.INVALID_ARGUMENT
    assert all(word in refusal.value.message for word in words), refusal.value.message


@pytest.mark.parametrize("name", ["text_input", "max_tokens"])
def test_a_missing_required_input_is_named(name):
    inputs = tensors()
    del inputs[name]
    with pytest.raises(RequestError, match=f"{name} is required"):
        decode(inputs)


def test_a_wrong_type_is_refused_by_name():
    with pytest.raises(RequestError, match="max_tokens must be INT32, got float32"):
        decode({**tensors(), "max_tokens": np.array([[4]], np.float32)})


def test_a_batch_over_one_is_refused_by_its_size():
    with pytest.raises(RequestError, match="batch of 2"):
        decode({name: np.repeat(array, 2, axis=0) for name, array in tensors().items()})


def test_streaming_needs_decoupled_mode():
    with pytest.raises(RequestError, match="Streaming is only supported in decoupled mode"):
        decode(tensors(stream=True), decoupled=False)
    assert decode(tensors(stream=False), decoupled=False)[0] == GenerationRequest("hi", 4)


def test_parameters_of_the_contract_that_ask_for_something_unsupported_are_refused():
    with pytest.raises(RequestError, match="beam_width is not supported, got 4") as refusal:
        decode(tensors(), '{"beam_width": 4}')
    assert refusal.value.code is ErrorCode.UNIMPLEMENTED
    assert not set(UNSUPPORTED) & set(DTYPES), "a served input is listed as unsupported"


def test_neutral_and_unknown_parameters_are_ignored():
    assert decode(tensors(), '{"beam_width": 1, "bad_words": "", "something_else": 5}')[0] == GenerationRequest("hi", 4)


def test_a_command_is_text():
    assert decode_command({"command": np.array([b"health"], dtype=object)}) == "health"


def test_a_delta_is_text_alone():
    outputs = encode_chunk("ü👋")
    assert {name: array.tolist() for name, array in outputs.items()} == {"text_output": [["ü👋".encode()]]}


def test_the_last_reply_has_what_was_asked_for_in_the_declared_types():
    outputs = encode_final(FINAL, "end", Wanted(True, True, True))
    assert {name: array.dtype for name, array in outputs.items()} == {f.name: np.dtype(NUMPY_TYPES[f.dtype]) for f in TEXT_OUTPUTS}
    assert {name: array.tolist()[0][0] for name, array in outputs.items()} == {
        "text_output": b"end",
        "finish_reason": b"length",
        "num_input_tokens": 3,
        "num_output_tokens": 7,
        "acceptance_rate": 0.75,
        "total_accepted_draft_tokens": 6,
        "total_draft_tokens": 8,
    }
    assert set(encode_final(FINAL, "end", Wanted())) == {"text_output", "finish_reason"}


def test_no_draft_tokens_mean_an_acceptance_rate_of_zero():
    message = {**FINAL, "draft_tokens": 0, "accepted_draft_tokens": 0}
    assert encode_final(message, "", Wanted(perf_metrics=True))["acceptance_rate"].tolist() == [[0.0]]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_committed_model_configuration_is_the_rendered_one(model):
    folder = Path(__file__).resolve().parents[2] / "model_repository" / model.name
    assert (folder / "config.pbtxt").read_text() == render_config(model)


def test_the_settings_reach_the_text_models_only():
    texts = {model.name: render_config(model, decoupled=False, max_batch_size=7) for model in MODELS}
    assert "max_batch_size: 7" in texts["ensemble"]
    assert "decoupled: false" in texts["tensorrt_llm_bls"]
    assert texts["spindle"] == render_config(next(model for model in MODELS if model.name == "spindle"))
