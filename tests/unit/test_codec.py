import difflib
import math
from pathlib import Path

import numpy as np
import pytest

from backend.ipc.messages import Chunk, Final, Frames, FromStub, PromptScores, Submit, frame
from backend.limits import MOST_ELEMENTS
from backend.request import ErrorCode, FinishReason, GenerationRequest, RequestError
from backend.triton_adapter import codec
from backend.triton_adapter.codec import (
    MOST_PARAMETERS,
    WantedOutputs,
    check_parameters,
    decode_command,
    encode_chunk,
    encode_final,
    load_arrays,
    meanings,
)
from backend.triton_adapter.fields import (
    MODELS,
    NUMPY_TYPES,
    TEXT_INPUTS,
    TEXT_OUTPUTS,
    TOKEN_INPUTS,
    TOKEN_OUTPUTS,
)
from backend.triton_adapter.rendering import render_config
from backend.triton_adapter.responder import ERRORS_AS_OUTPUTS
from docs.tools.tensors_page import render_contract

DTYPES = {field.name: NUMPY_TYPES[field.dtype] for field in (*TEXT_INPUTS, *TOKEN_INPUTS)}
SERVED = [field for field in TEXT_OUTPUTS if not field.refused]
TIMES = {
    "arrival_time_ns": 1,
    "first_scheduled_time_ns": 2,
    "first_token_time_ns": 2**40,
    "last_token_time_ns": 2**41,
}
BLOCKS = {
    "kv_cache_alloc_new_blocks": 5,
    "kv_cache_reused_blocks": 2,
    "kv_cache_alloc_total_blocks": 7,
}
FINAL = {
    "finish_reason": FinishReason.LENGTH,
    "num_input_tokens": 3,
    "num_output_tokens": 7,
    "draft_tokens": 8,
    "accepted_draft_tokens": 6,
}
FINAL |= {"drafts": [("small", 5, 4), ("lookup", 3, 2)], "seed": 2**64 - 1}
FINAL |= {"verified_steps": [(3, 3), (3, 1), (2, 2)], "k_max": 4}
FINAL |= {"times_s": [time_ns / 1e9 for time_ns in TIMES.values()], "kv_blocks": (5, 2)}


def decode(inputs, **options):
    """Return what a request of one part means."""
    (part,) = codec.decode(inputs, **options)
    return part


def tensors(**values):
    """Return input tensors with a batch of one, as Triton hands them over (text as bytes)."""
    arrays = {}
    for name, value in {"text_input": "hi", "max_tokens": 4, **values}.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array([items], dtype=DTYPES[name])
    return arrays


def test_only_the_required_inputs_leave_every_option_unset():
    assert decode(tensors()) == (GenerationRequest("hi", 4), WantedOutputs())


def test_every_input_arrives_in_the_request():
    values = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.5,
        "seed": 2**64 - 1,
        "end_id": -1,
        "pad_id": 2,
        "num_draft_tokens": 0,
    }
    values |= {"cache_salt": "tenant"}
    values |= {
        "return_context_logits": True,
        "return_generation_logits": True,
        "return_top_log_probs": 3,
    }
    values |= {"return_prompt_log_probs": True}
    values |= {
        "min_tokens": 9,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "prompt_ignore_length": 2**31 - 1,
    }
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]+"}
    flags = {"stream": True, "exclude_input_in_output": True, "return_log_probs": True}
    flags |= {"remember": False, "fit_max_tokens": True, "skip_special_tokens": False}
    flags |= {"add_special_tokens": False}
    lists = {
        "stop_words": ["ab", "", "ü"],
        "stop_token_ids": [3, 9],
        "bad_words": ["x y"],
        "embedding_bias_words": ["", "z"],
        "embedding_bias_weights": [0.5, -2.0],
    }
    lists |= {"logit_bias_ids": [5, 7], "logit_bias_values": [0.5, -2.0]}
    request, wanted = decode(
        tensors(
            **values,
            **guide,
            **flags,
            **lists,
            return_perf_metrics=True,
            return_num_input_tokens=True,
        )
    )
    known = {field.name for field in TEXT_INPUTS if field.effect and not field.refused}
    known -= {"num_return_sequences", "prompt_token_ids", "resumed_tokens"}
    assert known == {*values, *guide, *flags, *lists, "text_input", "max_tokens"} | {
        f"return_{name}" for name in ("num_input_tokens", "num_output_tokens", "perf_metrics")
    }
    values |= {
        "guide_type": "regex",
        "guide": "[a-c]+",
        "top_log_probs": values.pop("return_top_log_probs"),
    }
    values["bias"] = tuple(
        zip(lists.pop("logit_bias_ids"), lists.pop("logit_bias_values"), strict=True)
    )
    assert request == GenerationRequest(
        "hi", 4, **values, **flags, **{name: tuple(items) for name, items in lists.items()}
    )
    assert wanted == WantedOutputs(
        num_input_tokens=True, num_output_tokens=False, perf_metrics=True
    )
    assert sent(request) == request


def test_a_prompt_may_be_token_ids_and_the_answer_is_text():
    given = tensors(text_input="", prompt_token_ids=[5, 0, 7], resumed_tokens=2)
    request, wanted = decode(given)
    assert (request.prompt_token_ids, request.text_input, wanted.tokens) == ((5, 0, 7), "", False)
    assert request.resumed_tokens == 2
    assert sent(request) == request


@pytest.mark.parametrize(
    ("name", "meant"), [("temprature", "temperature"), ("stopwords", "stop_words")]
)
def test_a_parameter_that_is_a_misspelt_input_is_refused(name, meant):
    with pytest.raises(RequestError, match=f"{name} is not an input: did you mean {meant}?"):
        check_parameters({"sequence_id": 3, name: 1})


def test_a_flood_of_parameters_is_not_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *given: compared.append(given) or [])
    check_parameters([f"parameter_{number}" for number in range(100_000)])
    check_parameters(["temperature" * 100_000])
    assert len(compared) <= MOST_PARAMETERS


@pytest.mark.parametrize("name", ["embedding_bias", "input_ids", "draft_input_ids"])
def test_a_tensor_of_too_many_elements_is_refused_before_it_is_read(name):
    dtype = np.float32 if name == "embedding_bias" else np.int32
    with pytest.raises(RequestError, match=f"{name} must have at most 2097152 elements, got 2097"):
        meanings(
            {
                "input_lengths": np.array([[1]], np.int32),
                "request_output_len": np.array([[1]], np.int32),
                name: np.zeros((1, MOST_ELEMENTS + 1), dtype),
            },
            TOKEN_INPUTS,
        )


def test_other_parameters_are_the_client_s_own():
    others = (
        "triton_enable_empty_final_response",
        "sequence_id",
        "priority",
        "timeout",
        "traceparent",
    )
    check_parameters(
        [*others, ERRORS_AS_OUTPUTS, "streaming", "len_penalty", "ignore_eos", "random_seed"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logit_bias_ids": [1]}, ["logit_bias_values", "got 0"]),
        ({"logit_bias_ids": [1], "logit_bias_values": [1e7]}, ["logit_bias_values", "1e+07"]),
        ({"prompt_token_ids": [1]}, ["text_input must be empty with prompt_token_ids"]),
        ({"text_input": ""}, ["text_input", "''"]),
        ({"text_input": b"a\xff"}, ["text_input", "UTF-8", "0xff", "offset 1"]),
        ({"stop_words": [b"ok", b"\x80"]}, ["stop_words", "UTF-8", "0x80"]),
        ({"max_tokens": 0}, ["max_tokens", "got 0"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"return_top_log_probs": 21}, ["return_top_log_probs", "20", "21"]),
        ({"top_p": -0.5}, ["top_p", "-0.5"]),
        ({"min_p": 1.5}, ["min_p", "between 0 and 1", "1.5"]),
        ({"top_p": math.nan}, ["top_p", "nan"]),
        ({"temperature": -1.0}, ["temperature", "-1"]),
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"temperature": math.inf}, ["temperature", "inf"]),
        ({"top_k": -1}, ["top_k", "-1"]),
        ({"num_draft_tokens": -2}, ["num_draft_tokens", "-2"]),
        ({"max_tokens": [1, 2]}, ["max_tokens", "shape", "[1, 2]"]),
        ({"min_tokens": -1}, ["min_tokens", "-1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "got 0"]),
        ({"repetition_penalty": math.inf}, ["repetition_penalty", "inf"]),
        ({"presence_penalty": math.nan}, ["presence_penalty", "nan"]),
        ({"frequency_penalty": -math.inf}, ["frequency_penalty", "-inf"]),
        ({"prompt_ignore_length": -1}, ["prompt_ignore_length", "at least 0", "-1"]),
        ({"bad_words": [b"\x80"]}, ["bad_words", "UTF-8", "0x80"]),
        (
            {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
            ["embedding_bias_weights", "(2)", "got 1"],
        ),
        ({"embedding_bias_words": ["a"]}, ["embedding_bias_weights", "(1)", "got 0"]),
        (
            {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0, math.nan]},
            ["embedding_bias_weights", "nan"],
        ),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [2e6]},
            ["embedding_bias_weights", "1e+06", "2e+06"],
        ),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(change, words):
    with pytest.raises(RequestError) as refusal:
        decode(tensors(**change))
    assert refusal.value.code is ErrorCode.INVALID_ARGUMENT
    assert all(word in refusal.value.message for word in words), refusal.value.message


def test_the_bounds_of_penalties_and_weights_are_themselves_allowed():
    edges = {
        "presence_penalty": -1e6,
        "frequency_penalty": 1e6,
        "embedding_bias_words": ["a", "b"],
        "embedding_bias_weights": [1e6, -1e6],
    }
    for factor in (1e-6, 1e6):
        assert decode(tensors(**edges, repetition_penalty=factor))[
            0
        ].repetition_penalty == pytest.approx(factor)


@pytest.mark.parametrize("name", ["text_input", "max_tokens"])
def test_a_missing_required_input_is_named(name):
    inputs = tensors()
    del inputs[name]
    with pytest.raises(RequestError, match=f"{name} is required"):
        decode(inputs)


def test_a_wrong_type_is_refused_by_name():
    with pytest.raises(RequestError, match="max_tokens must be INT32, got float32"):
        decode({**tensors(), "max_tokens": np.array([[4]], np.float32)})


def test_a_batch_and_several_texts_become_parts_that_say_which_they_are():
    inputs = {
        name: np.repeat(array, 2, axis=0)
        for name, array in tensors(seed=2**64 - 1, num_return_sequences=2).items()
    }
    inputs["text_input"][1, 0] = b"other"
    parts = codec.decode(inputs, timeout_s=1.5)
    assert [request for request, _ in parts] == [
        GenerationRequest(text, 4, seed=seed, timeout_s=1.5)
        for text in ("hi", "other")
        for seed in (2**64 - 1, 0)
    ]
    assert [(wanted.batch_index, wanted.sequence_index) for _, wanted in parts] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    outputs = encode_chunk([Chunk(text="a")], parts[3][1])
    assert lists(outputs) == {
        "text_output": [[b"a"]],
        "batch_index": [[1]],
        "sequence_index": [[1]],
    }


@pytest.mark.parametrize("change", [{"num_return_sequences": 0}, {"num_return_sequences": 257}])
def test_a_number_of_texts_out_of_range_is_refused(change):
    with pytest.raises(
        RequestError, match=r"num_return_sequences must be between 1 and 256, got \d"
    ):
        decode(tensors(**change))


def test_several_texts_need_decoupled_mode():
    with pytest.raises(
        RequestError, match="num_return_sequences over 1 is only supported in decoupled mode, got 3"
    ):
        decode(tensors(num_return_sequences=3), decoupled=False)


def token_tensors(**arrays):
    """Return the tensors of a request of token ids."""
    values = {"input_ids": [5, 6, 7], "input_lengths": [3], "request_output_len": [4], **arrays}
    return {name: np.array([value], dtype=DTYPES[name]) for name, value in values.items()}


def decode_tokens(**arrays):
    return decode(token_tensors(**arrays), fields=TOKEN_INPUTS)


def test_a_request_of_token_ids_arrives_as_such():
    request, wanted = decode_tokens(
        input_lengths=[2],
        runtime_top_k=[3],
        runtime_top_p=[0.5],
        streaming=[True],
        stop=[False],
        stop_words_list=[[5, 6, 7, 0], [2, 3, -1, -1]],
        bad_words_list=[[8], [1]],
        embedding_bias=[0, 0.5, 0, -2],
        draft_input_ids=[1, 2],
    )
    words = {
        "stop_word_ids": ((5, 6), (7,)),
        "bad_word_ids": ((8,),),
        "bias": ((1, 0.5), (3, -2.0)),
    }
    assert request == GenerationRequest(
        "", 4, input_ids=(5, 6), top_k=3, top_p=0.5, stream=True, **words
    )
    assert wanted == WantedOutputs(tokens=True)
    assert sent(request) == request


def test_empty_lists_as_preprocessing_makes_them_ask_for_nothing():
    request, _ = decode_tokens(
        stop_words_list=[[], []], bad_words_list=[[0], [-1]], embedding_bias=[]
    )
    assert request == GenerationRequest("", 4, input_ids=(5, 6, 7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_lengths": [4]}, "input_lengths must be between 1 and the 3 input_ids, got 4"),
        ({"input_ids": []}, "input_lengths must be between 1 and the 0 input_ids, got 3"),
        ({"request_output_len": [0]}, "request_output_len must be at least 1, got 0"),
        ({"runtime_top_p": [2.0]}, "runtime_top_p must be between 0 and 1 .*got 2"),
        (
            {"stop_words_list": [[1, 2], [2, 1]]},
            r"stop_words_list must have rising ends .*got \[2, 1\]",
        ),
        (
            {"stop_words_list": [[1], [2]]},
            "stop_words_list must have rising ends of words, at most 1",
        ),
        ({"bad_words_list": [1, 2]}, r"bad_words_list must have shape \[1, 2, -1\]"),
        ({"embedding_bias": [math.nan]}, "embedding_bias must be between .*got nan"),
        ({"runtime_top_p_decay": [0.0]}, "runtime_top_p_decay must be over 0 and at most 1, got 0"),
        ({"runtime_top_p_min": [2.0]}, "runtime_top_p_min must be between 0 and 1, got 2"),
        (
            {"context_phase_params": [1]},
            "context_phase_params is not supported: prefill and decoding run in one engine process",
        ),
    ],
)
def test_bad_token_tensors_are_refused_by_the_model_s_own_names(change, words):
    with pytest.raises(RequestError, match=words):
        decode_tokens(**change)


def test_tokens_come_as_one_beam_with_their_number():
    final = Final(**FINAL, tokens=[9], log_probs=[-0.5], cum_log_prob=-0.5)
    outputs = encode_final(
        final,
        [Chunk(tokens=[7, 8], log_probs=[-1.0, -1.0], cum_log_prob=-2.0)],
        WantedOutputs(tokens=True),
    )
    assert lists(outputs)["output_ids"] == [[[7, 8, 9]]]
    assert lists(outputs)["sequence_length"] == [[3]]
    assert "text_output" not in outputs
    types = {field.name: NUMPY_TYPES[field.dtype] for field in TOKEN_OUTPUTS}
    assert all(array.dtype == types[name] for name, array in outputs.items())


def test_streaming_needs_decoupled_mode():
    with pytest.raises(RequestError, match="Streaming is only supported in decoupled mode"):
        decode(tensors(stream=True), decoupled=False)
    assert decode(tensors(stream=False), decoupled=False)[0] == GenerationRequest("hi", 4)


REFUSED = {field.name: field for field in TEXT_INPUTS if field.refused}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_tensor_and_reason(name):
    field = REFUSED[name]
    array = np.full(
        [1, *(abs(size) for size in field.dims)], b"x" if field.dtype == "STRING" else 2
    ).astype(NUMPY_TYPES[field.dtype])
    with pytest.raises(
        RequestError, match=f"^{name} is not supported: {field.refused.value}, got "
    ) as refusal:
        decode({**tensors(), name: array})
    assert refusal.value.code is ErrorCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_may_ask_for_nothing(name):
    field = REFUSED[name]
    for value in (*field.neutral, None):
        item = value.encode() if isinstance(value, str) else value
        array = np.array([[] if value is None else [item]], NUMPY_TYPES[field.dtype])
        assert decode({**tensors(), name: array})[0] == GenerationRequest("hi", 4)


def test_inputs_without_effect_change_nothing():
    assert decode({**tensors(), **tensors(length_penalty=0.5, use_draft_logits=True)})[
        0
    ] == GenerationRequest("hi", 4)


def test_a_command_is_text_and_so_is_its_secret():
    given = {"command": np.array([b"health"], dtype=object)}
    assert decode_command(given) == ("health", "")
    given["secret"] = np.array([b"s"], dtype=object)
    assert decode_command(given) == ("health", "s")


def sent(request):
    """A request after its way to the engine process."""
    (message,) = Frames(FromStub).feed(frame(Submit(request=request)))
    return message.request


def lists(outputs):
    return {name: array.tolist() for name, array in outputs.items()}


def test_a_response_carries_the_text_of_its_deltas():
    assert lists(encode_chunk([Chunk(text="ü"), Chunk(text="👋")], WantedOutputs())) == {
        "text_output": [["ü👋".encode()]]
    }


def test_log_probabilities_of_all_deltas_come_as_one_beam_and_the_sum_is_the_latest():
    deltas = [
        Chunk(text="a", log_probs=[-0.5, -1.0], cum_log_prob=-1.5),
        Chunk(text="b", log_probs=[-0.25], cum_log_prob=-1.75),
    ]
    outputs = encode_chunk(deltas, WantedOutputs())
    assert (outputs["output_log_probs"].dtype, outputs["cum_log_probs"].dtype) == (
        np.float32,
        np.float32,
    )
    assert lists(outputs) == {
        "text_output": [[b"ab"]],
        "output_log_probs": [[[-0.5, -1.0, -0.25]]],
        "cum_log_probs": [[-1.75]],
    }
    last = Final(**FINAL, text="c", log_probs=[-2.0], cum_log_prob=-3.75)
    final = lists(encode_final(last, deltas, WantedOutputs()))
    assert (final["text_output"], final["cum_log_probs"]) == ([[b"abc"]], [[-3.75]])
    assert final["output_log_probs"] == [[[-0.5, -1.0, -0.25, -2.0]]]


def test_the_last_reply_has_what_was_asked_for_in_the_declared_types(tmp_path):
    files = {}
    for name in ("context_logits", "generation_logits"):
        files[name] = str(tmp_path / f"{name}.npy")
        np.save(files[name], np.array([[1.5, -2.0]], np.float32))
    likeliest = [[(b"a", -0.1), (b"", -2.0)]]
    final = Final(
        **FINAL,
        **files,
        text="end",
        log_probs=[-0.5],
        cum_log_prob=-0.75,
        token_bytes=[b"\xff"],
        top=likeliest,
        prompt=PromptScores([b"x", b"\xff"], [-0.25], likeliest),
    )
    message = load_arrays(final)
    assert not list(tmp_path.iterdir())
    outputs = encode_final(
        message, [], WantedOutputs(True, True, True, batch_index=2, sequence_index=1)
    )
    assert {name: array.dtype for name, array in outputs.items()} == {
        f.name: np.dtype(NUMPY_TYPES[f.dtype]) for f in SERVED
    }
    assert {name: array.ndim for name, array in outputs.items()} == {
        f.name: 1 + len(f.dims) for f in SERVED
    }
    assert {name: array.flatten().tolist() for name, array in outputs.items()} == {
        "text_output": [b"end"],
        "finish_reason": [b"length"],
        "seed": [2**64 - 1],
        "num_input_tokens": [3],
        "num_output_tokens": [7],
        "acceptance_rate": [0.75],
        "total_accepted_draft_tokens": [6],
        "total_draft_tokens": [8],
        "draft_names": [b"small", b"lookup"],
        "draft_tokens": [5, 3],
        "accepted_draft_tokens": [4, 2],
        "acceptance_histogram": [0, 1, 1, 1, 0],
        "per_step_drafted": [3, 3, 2],
        "per_step_accepted": [3, 1, 2],
        "cum_log_probs": [-0.75],
        "output_log_probs": [-0.5],
        "batch_index": [2],
        "sequence_index": [1],
        "output_tokens": [b"\xff"],
        "top_tokens": [b"a", b""],
        "top_log_probs": pytest.approx([-0.1, -2.0]),
        "prompt_tokens": [b"x", b"\xff"],
        "prompt_log_probs": [-0.25],
        "prompt_top_tokens": [b"a", b""],
        "prompt_top_log_probs": pytest.approx([-0.1, -2.0]),
        "context_logits": [1.5, -2.0],
        "generation_logits": [1.5, -2.0],
        **{name: [value] for name, value in (TIMES | BLOCKS).items()},
    }
    least = {"text_output", "finish_reason"}
    assert set(encode_final(Final(**FINAL, text="end"), [], WantedOutputs())) == {*least, "seed"}
    assert (
        set(encode_final(Final(**FINAL | {"seed": None}), [], WantedOutputs())) == least
    )  # greedy


def test_no_draft_tokens_mean_an_acceptance_rate_of_zero():
    none = {"draft_tokens": 0, "accepted_draft_tokens": 0, "drafts": [], "verified_steps": []}
    outputs = encode_final(Final(**FINAL | none), [], WantedOutputs(perf_metrics=True))
    assert outputs["acceptance_rate"].tolist() == [[0.0]]
    assert outputs["acceptance_histogram"].tolist() == [[0] * 5]
    assert not {"draft_names", "per_step_drafted", "per_step_accepted"} & set(outputs)


def test_the_committed_table_of_tensors_is_the_rendered_one():
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tensors.md"
    assert page.read_text() == render_contract()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_committed_model_configuration_is_the_rendered_one(model):
    folder = Path(__file__).resolve().parents[2] / "model_repository" / model.name
    assert (folder / "config.pbtxt").read_text() == render_config(model)


def test_the_settings_reach_the_text_models_only():
    texts = {
        model.name: render_config(model, decoupled=False, max_batch_size=7) for model in MODELS
    }
    assert "max_batch_size: 7" in texts["ensemble"]
    assert "decoupled: false" in texts["tensorrt_llm_bls"]
    assert texts["spindle"] == render_config(
        next(model for model in MODELS if model.name == "spindle")
    )
