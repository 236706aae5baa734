"""Dynamo's requests as tensors of ``tensorrt_llm``, and responses as Dynamo's chunks."""

import numpy as np
import pytest

from backend.fleet.requests import Chunks, ResponseError, WrongRequestError, seed_of, tensors_of
from backend.triton_adapter.fields import NUMPY_TYPES, TOKEN_INPUTS

MARKER = [7, 8]
CONTEXT = 100
FIELDS = {field.name: field for field in TOKEN_INPUTS}


def made(token_ids=(1, 2, 3), **request):
    """Return a request's tensors, each checked against the model's table."""
    tensors = tensors_of({"token_ids": [*token_ids], **request}, "id-1", MARKER, CONTEXT)
    for name, array in tensors.items():
        assert array.dtype == np.dtype(NUMPY_TYPES[FIELDS[name].dtype]), name
        assert array.ndim == 1 + len(FIELDS[name].dims), name
    return {name: array[0].tolist() for name, array in tensors.items()}


def test_a_bare_request_goes_on_to_the_end_of_the_context_with_the_seed_of_its_id():
    assert made() == {
        "input_ids": [1, 2, 3],
        "input_lengths": [3],
        "request_output_len": [97],
        "streaming": [True],
        "seed": [seed_of("id-1")],
    }


def test_options_get_our_names():
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": None,
        "presence_penalty": 1.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "seed": 2**63,
        "n": 1,
    }
    stop = {"max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids_hidden": [5, 4]}
    tensors = made(
        sampling_options=options,
        stop_conditions=stop,
        output_options={"logprobs": 1},
        routing={"cache_salt": "tenant"},
    )
    assert {name: tensors[name] for name in tensors.keys() - {"input_ids", "input_lengths"}} == {
        "request_output_len": [9],
        "streaming": [True],
        "seed": [2**63],
        "temperature": [0.5],
        "runtime_top_p": [0.25],
        "presence_penalty": [2.0],  # of OpenAI's meaning: before the temperature
        "frequency_penalty": [4.0],
        "prompt_ignore_length": [2**31 - 1],
        "repetition_penalty": [1.5],
        "min_tokens": [2],
        "stop_words_list": [[4, 5], [1, 2]],
        "return_log_probs": [True],
        "cache_salt": [b"tenant"],
    }
    assert made(stop_conditions={"ignore_eos": True, "stop_token_ids": [4]})["end_id"] == [-1]
    assert made(sampling_options={"temperature": 1.0, "top_p": 0.0})["runtime_top_k"] == [1]


@pytest.mark.parametrize(
    ("given", "kind", "guide"),
    [
        ({"json": {"type": "object"}}, b"json_schema", b'{"type": "object"}'),
        ({"regex": "a+", "backend": "x"}, b"regex", b"a+"),
        ({"grammar": 'root ::= "a"'}, b"ebnf_grammar", b'root ::= "a"'),
        ({"choice": ["a.b", "c"]}, b"regex", rb"a\.b|c"),
    ],
)
def test_grammars_are_passed_on(given, kind, guide):
    tensors = made(sampling_options={"guided_decoding": given})
    assert tensors["guided_decoding_guide_type"] == [kind]
    assert tensors["guided_decoding_guide"] == [guide]


def test_annotations_carry_what_dynamo_has_no_field_for():
    notes = ["num_draft_tokens=0", "remember=false", "regex=a=b", "formatted_prompt"]
    tensors = made(annotations=notes)
    assert tensors["num_draft_tokens"] == [0]
    assert tensors["remember"] == [False]
    assert tensors["guided_decoding_guide"] == [b"a=b"]


def test_text_after_the_last_opening_of_an_answer_is_resumed():
    assert "resumed_tokens" not in made([1, 7, 8])
    assert made([7, 8, 1, 7, 8, 2, 7])["resumed_tokens"] == [2]
    assert "resumed_tokens" not in made([1, 2])


def test_a_lowered_max_tokens_says_how_much_is_resumed():
    def resumed(left):
        stop = {"max_tokens": left}
        made_of = made([1, 2, 3, 4], annotations=["max_tokens=10"], stop_conditions=stop)
        return made_of.get("resumed_tokens")

    assert [resumed(left) for left in (10, 8, 1)] == [None, [2], [3]]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"sampling_options": {"n": 2}}, "n must be 1, got 2"),
        ({"output_options": {"logprobs": 5}}, "logprobs must be at most 1"),
        ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs is not supported"),
        ({"annotations": ["remember=1"]}, "remember must be true or false, got '1'"),
        ({"annotations": ["num_draft_tokens=-1"]}, "num_draft_tokens must be a whole number"),
        ({"annotations": ["max_tokens=x"]}, "max_tokens must be a whole number, got 'x'"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {"a": 1}}}}, "structural_tag"),
        (
            {
                "sampling_options": {"guided_decoding": {"regex": "a"}},
                "annotations": ["json_schema={}"],
            },
            "guided_decoding must be one of",
        ),
    ],
)
def test_what_cannot_be_served_is_named(request_, message):
    with pytest.raises(WrongRequestError, match=message):
        made(**request_)


def outputs(tokens, reason=None, seed=None, log_probs=None):
    """Return a response's tensors."""
    return {
        "output_ids": np.array([[tokens]], np.int32),
        "output_log_probs": None if log_probs is None else np.array([[log_probs]], np.float32),
        "finish_reason": None if reason is None else np.array([[reason]], np.object_),
        "seed": None if seed is None else np.array([[seed]], np.uint64),
    }


def test_the_last_chunk_has_reason_usage_and_seed():
    chunks = Chunks(3, log_probs=True)
    first = chunks.chunk(outputs([5, 6], log_probs=[-1.0, -2.0]))
    assert first == {"token_ids": [5, 6], "index": 0, "log_probs": [-1.0, -2.0]}
    assert chunks.chunk(outputs([2], b"end_id", 9, [-0.5])) == {
        "token_ids": [2],
        "index": 0,
        "log_probs": [-0.5],
        "finish_reason": "stop",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "engine_data": {"seed": 9},
    }


def test_an_error_has_its_code_and_sentence():
    with pytest.raises(ResponseError, match="the queue is full") as error:
        Chunks(3, log_probs=False).chunk(outputs([], b"error:UNAVAILABLE the queue is full"))
    assert error.value.code == "UNAVAILABLE"
