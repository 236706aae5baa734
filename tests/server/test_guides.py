"""Guided decoding through the real tritonserver: grammars of every kind, over HTTP and gRPC, for
text and for token ids.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.tensors import token_request

PATTERN = "([a-f]{3}[0-9]){2,4}(yes|no)"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
}
SCHEMA["additionalProperties"] = False
GUIDE = {
    "guided_decoding_guide_type": "regex",
    "guided_decoding_guide": PATTERN,
    "end_id": 256,
    "exclude_input_in_output": True,
}


NO_GUIDE = {"guided_decoding_guide_type": [[""]], "guided_decoding_guide": [[""]]}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 4}, {"temperature": 1.0}],
    ids=["greedy", "seeded", "sampled"],
)
def test_a_text_follows_the_regex_whatever_is_speculated(service, options):
    texts = set()
    for length in (0, 4, 4, 2):
        status, reply = service.generate(
            "ab", 40, **GUIDE, **options, num_draft_tokens=length, return_perf_metrics=True
        )
        assert (status, reply.get("finish_reason")) == (200, "end_id"), reply
        assert re.fullmatch(PATTERN, reply["text_output"])
        assert (reply["total_draft_tokens"] > 0) == (length > 0)
        texts.add(reply["text_output"])
    assert len(texts) == 1 or options.keys() == {"temperature"}


def test_json_and_grammars_hold_too(service):
    ask = {"end_id": 256, "exclude_input_in_output": True, "temperature": 1.0, "seed": 1}
    _, reply = service.generate(
        "ab",
        400,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=json.dumps(SCHEMA),
        **ask,
    )
    if reply["finish_reason"] == "end_id":  # a fake may write a number without end
        assert json.loads(reply["text_output"]).keys() == {"n", "b"}
    assert reply["text_output"].lstrip().startswith("{")
    _, reply = service.generate("ab", 5, guided_decoding_guide_type="json", **ask)
    assert (
        reply["text_output"].lstrip()[:1] in set('{["-0123456789tfn')
        or not reply["text_output"].strip()
    )
    _, reply = service.generate(
        "ab",
        50,
        guided_decoding_guide_type="ebnf_grammar",
        guided_decoding_guide='root ::= "x" root | "y"',
        **ask,
    )
    assert re.fullmatch("x*y?", reply["text_output"])


def test_a_stream_of_token_ids_follows_the_grammar_over_grpc(client):
    ask = {name: [[value]] for name, value in GUIDE.items()}
    responses = client.ask(
        "tensorrt_llm", **{**token_request("ab", 40), **ask, "streaming": [[True]]}
    )
    tokens = np.concatenate([response["output_ids"] for response in responses], axis=2)[
        0, 0
    ].tolist()
    assert tokens.pop() == 256
    assert re.fullmatch(PATTERN, bytes(tokens).decode())


def test_log_probabilities_of_what_the_grammar_forbids_are_bounded(client):
    ask = {name: [[value]] for name, value in GUIDE.items()}
    ask |= {"return_log_probs": [[True]], "return_top_log_probs": [[20]]}
    (response,) = client.ask("ensemble", text_input=[["ab"]], max_tokens=[[8]], **ask)
    values = response["top_log_probs"][0]
    assert (values.shape, values.min(), values[:, 0].min() > -10) == ((8, 20), -9999, True)
    assert response["output_log_probs"].min() >= -9999
    end = {"logit_bias_ids": [[256]], "logit_bias_values": [[100.0]]}
    (response,) = client.ask(
        "ensemble", text_input=[["ab"]], max_tokens=[[2]], **{**ask, **end, **NO_GUIDE}
    )
    assert response["output_tokens"][0].tolist() == [b"<|end|>"]
    assert response["top_tokens"][0, 0, 0] == b"<|end|>"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"guided_decoding_guide_type": "poem", "guided_decoding_guide": "x"},
            "guided_decoding_guide_type must be one of",
        ),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide is required"),
        (
            {"guided_decoding_guide": "x"},
            "guided_decoding_guide must come with guided_decoding_guide_type",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[x"},
            "error: unclosed character class",
        ),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"},
            "guided_decoding_guide is no json_schema",
        ),
        ({"guided_decoding_guide_type": "json", "end_id": -1}, "end_id must not be -1"),
    ],
)
def test_a_guide_that_is_wrong_is_refused_by_name(service, inputs, message):
    status, reply = service.generate("ab", 4, **{"end_id": 256, **inputs})
    assert status >= 400
    assert message in reply["error"]


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 0}])
def test_a_grammar_that_grows_too_large_is_the_request_s_fault(service, client, options):
    guide = {**GUIDE, "guided_decoding_guide": "(a{1,1000}){1,1000}"}
    refusal = r"guided_decoding_guide cannot be followed any further: it is too large: lexer"
    status, reply = service.generate("ab", 200, **guide, **options)
    assert (status, bool(re.match(refusal, reply["error"]))) == (400, True), reply
    ask = {name: [[value]] for name, value in (guide | options).items()}
    with pytest.raises(InferenceServerException, match=refusal):
        client.ask("tensorrt_llm", **{**token_request("ab", 200), **ask})
    assert service.generate("ab", 50, **guide, **options)[0] == 200


def test_an_empty_guide_asks_for_nothing(service):
    plain = service.generate("ab", 12)
    assert (
        service.generate("ab", 12, guided_decoding_guide_type="", guided_decoding_guide="") == plain
    )


@pytest.mark.slow
def test_a_grammar_that_takes_long_to_read_delays_no_other_request(service):
    endless = json.dumps({"type": "integer", "multipleOf": 99_999_989})
    bomb = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": endless}
    assert service.generate("ab", 40, **GUIDE)[0] == 200
    with ThreadPoolExecutor(9) as pool:
        bombs = [pool.submit(service.generate, "ab", 4, end_id=256, **bomb) for _ in range(8)]
        answered = 0
        while not any(reply.done() for reply in bombs):
            assert service.generate("ab", 4)[0] == 200
            assert service.generate("ab", 40, **GUIDE)[0] == 200  # its grammar is known
            answered += 1
        assert answered > 20
        for reply in bombs:  # it was read once
            status, answer = reply.result()
            assert status == 400
            assert "it takes over 5 s to read" in answer["error"]
    new = {**GUIDE, "guided_decoding_guide": "[ab]{3}"}
    assert service.generate("ab", 40, **new)[0] == 200
