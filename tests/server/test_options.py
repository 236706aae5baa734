"""Every option of a request, through the real tritonserver, against what the option means
(``tests.options``).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest

from backend.request import SamplingParams
from tests.fakes.markov import ORDER, _candidates
from tests.options import greedy

PROMPT, TOKENS = "0123", 60
PLAIN = bytes(greedy(PROMPT, TOKENS, SamplingParams())[0]).decode()
BANNED = PLAIN[7:10]
BIAS = {"embedding_bias_words": ["!!b", "", "z"], "embedding_bias_weights": [14.9, 50.0, -0.5]}
CASES = {
    "none": ({}, {}),
    "bad_words": (
        {"bad_words": [BANNED, "", "x"]},
        {"bad_words": (tuple(BANNED.encode()), tuple(b"x"))},
    ),
    "bad_words reach into the prompt": (
        {"bad_words": ["3" + PLAIN[0]]},
        {"bad_words": (tuple(b"3" + PLAIN[0].encode()),)},
    ),
    "repetition_penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "presence_penalty": ({"presence_penalty": 1.25}, {"presence_penalty": 1.25}),
    "frequency_penalty": ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    "prompt_ignore_length": (
        {"presence_penalty": -5.0, "frequency_penalty": 20.0, "prompt_ignore_length": 3},
        {"presence_penalty": -5.0, "frequency_penalty": 20.0, "prompt_ignore_length": 3},
    ),
    "embedding_bias": (BIAS, {"bias": ((ord("!"), 29.8), (ord("b"), 14.9), (ord("z"), -0.5))}),
    "end_id": ({"end_id": ord(PLAIN[5])}, {"end_ids": (ord(PLAIN[5]),)}),
    "min_tokens": (
        {"end_id": ord(PLAIN[5]), "min_tokens": 20},
        {"end_ids": (ord(PLAIN[5]),), "min_tokens": 20},
    ),
}
CASES["all"] = tuple(
    {name: value for case in CASES.values() for name, value in case[side].items()}
    for side in (0, 1)
)
CASES["all"][0]["bad_words"] = ["", BANNED, "3" + PLAIN[0], "x"]
CASES["all"][1]["bad_words"] = (
    tuple(BANNED.encode()),
    tuple(b"3" + PLAIN[0].encode()),
    tuple(b"x"),
)


def expectation(options):
    """Return (text, finish reason, log-probabilities)."""
    tokens, log_probs, ended = greedy(PROMPT, TOKENS, SamplingParams(**options))
    return bytes(tokens[: len(tokens) - ended]).decode(), "end_id" if ended else "length", log_probs


def listed(value):
    """Return a JSON output as a list: /generate makes a number of a tensor with one element."""
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", CASES)
def test_an_option_means_over_http_what_it_means_one_token_at_a_time(service, name):
    inputs, options = CASES[name]
    text, reason, log_probs = expectation(options)
    flags = {
        "exclude_input_in_output": True,
        "return_log_probs": True,
        "return_num_output_tokens": True,
    }
    status, reply = service.generate(PROMPT, TOKENS, **flags, **inputs)
    assert (status, reply.get("text_output"), reply.get("finish_reason")) == (200, text, reason), (
        reply
    )
    assert (text != PLAIN) == (name != "none")
    assert listed(reply["output_log_probs"]) == pytest.approx(log_probs, abs=1e-5)
    assert reply["cum_log_probs"] == pytest.approx(sum(log_probs), abs=1e-4)
    assert reply["num_output_tokens"] == len(log_probs)


def test_every_streamed_response_has_the_log_probabilities_of_its_own_tokens(service):
    inputs, options = CASES["all"]
    text, _, log_probs = expectation(options)
    flags = {"stream": True, "return_log_probs": True}
    _, body = service.post(
        "/v2/models/ensemble/generate_stream",
        {"text_input": PROMPT, "max_tokens": TOKENS, **flags, **inputs},
    )
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    parts = [listed(event["output_log_probs"]) for event in events]
    assert len(parts) > 5
    assert "".join(event["text_output"] for event in events) == text
    assert [value for part in parts for value in part] == pytest.approx(log_probs, abs=1e-5)
    assert [event["cum_log_probs"] for event in events] == pytest.approx(
        list(accumulate(map(sum, parts))), abs=1e-4
    )


def test_log_probabilities_count_the_tokens_of_a_text_that_a_stop_word_cuts(service):
    flags = {
        "exclude_input_in_output": True,
        "return_log_probs": True,
        "return_num_output_tokens": True,
    }
    _, reply = service.generate(PROMPT, TOKENS, stop_words=[PLAIN[9:12]], **flags)
    assert (reply["text_output"], reply["num_output_tokens"], len(reply["output_log_probs"])) == (
        PLAIN[:9],
        12,
        12,
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_tritonclient_gets_the_contracts_shapes(client, model, stream):
    inputs, options = CASES["all"]
    text, _, log_probs = expectation(options)
    flags = {"stream": stream, "exclude_input_in_output": True, "return_log_probs": True}
    asked = {"text_input": PROMPT, "max_tokens": TOKENS, **flags, **inputs}
    rows = {name: value if isinstance(value, list) else [value] for name, value in asked.items()}
    responses = client.ask(model, **{name: [row] for name, row in rows.items()})
    assert (len(responses) > 5) == stream
    parts = [response["output_log_probs"] for response in responses]
    sums = [response["cum_log_probs"] for response in responses]
    assert {(part.dtype, part.ndim, part.shape[:2]) for part in parts} == {
        (np.dtype(np.float32), 3, (1, 1))
    }
    assert {(total.dtype, total.shape) for total in sums} == {(np.dtype(np.float32), (1, 1))}
    assert np.concatenate(parts, axis=2)[0, 0] == pytest.approx(log_probs, abs=1e-5)
    assert sums[-1].item() == pytest.approx(sum(log_probs), abs=1e-4)
    assert b"".join(response["text_output"].item() for response in responses).decode() == text


def test_tokens_below_a_share_of_the_likeliest_are_never_drawn_whatever_is_speculated(service):
    """The fake's letters have the shares 0.6, 0.25, 0.1 and 0.05."""

    def text(seed, **options):
        asked = {"temperature": 1.0, "exclude_input_in_output": True, "seed": seed, **options}
        status, reply = service.generate(PROMPT, 60, **asked)
        assert status == 200, reply
        return reply["text_output"]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: text(seed, min_p=0.3), range(6)))
        plain = list(pool.map(lambda seed: text(seed, min_p=0.3, num_draft_tokens=0), range(6)))
    assert plain == texts
    places = set()
    for made in texts:
        tokens = list((PROMPT + made).encode())
        for at in range(len(PROMPT), len(tokens)):
            letters = _candidates(b"target", bytes(tokens[:at][-ORDER:])).tolist()
            places.add(letters.index(tokens[at]))
    assert places == {0, 1}
    assert text(1, min_p=1.0) == text(2, min_p=1.0) == PLAIN[:60]
    assert text(1, min_p=0.0) == text(1)


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 0}, {"end_id": -1}])
def test_stop_token_ids_end_the_text_and_are_no_part_of_it(service, options):
    flags = {"exclude_input_in_output": True, "return_num_output_tokens": True, **options}
    ids = [ord(PLAIN[7]), 0]
    cut = min(PLAIN.index(chr(token)) for token in ids if chr(token) in PLAIN)
    status, reply = service.generate(PROMPT, TOKENS, stop_token_ids=ids, **flags)
    assert (status, reply["text_output"], reply["finish_reason"]) == (200, PLAIN[:cut], "end_id")
    assert reply["num_output_tokens"] == cut + 1
    status, reply = service.generate(PROMPT, TOKENS, stop_token_ids=ids, min_tokens=TOKENS, **flags)
    assert not any(chr(token) in reply["text_output"] for token in ids)
    status, reply = service.generate(PROMPT, 4, stop_token_ids=[999])
    assert status == 400
    assert "stop_token_ids must contain token ids below 257, got 999" in reply["error"]


def test_a_seed_gives_the_same_text_under_any_speculation_and_load_and_none_another_each_time(
    service,
):
    def text(length, **options):
        limits = {} if length is None else {"num_draft_tokens": length}
        status, reply = service.generate(
            PROMPT, 80, temperature=1.0, top_p=0.95, bad_words=["ab"], **options, **limits
        )
        assert status == 200, reply
        return reply["text_output"]

    with ThreadPoolExecutor(12) as pool:
        seeded = list(pool.map(lambda length: text(length, seed=7), [0, 1, 2, 3, 4, None] * 3))
        others = list(pool.map(text, [None] * 6))
    assert len(set(seeded)) == 1
    assert len({*seeded, *others}) == 7
    assert text(None, seed=8) != seeded[0]
