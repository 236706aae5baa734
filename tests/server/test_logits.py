"""Logits, the likeliest tokens and a decaying top-p through the real tritonserver, over gRPC and
HTTP.
"""

import numpy as np
import pytest

from tests.fakes.markov import _UNLIKELY_LOGIT, ORDER, VOCAB_SIZE, _candidates
from tests.options import LETTER_LOGITS
from tests.server.tensors import END, token_request

ASK = {
    "return_context_logits": [[True]],
    "return_generation_logits": [[True]],
    "exclude_input_in_output": [[True]],
}


def model_logits(tokens):
    """The fake target's own logits after a text."""
    logits = np.full(VOCAB_SIZE, _UNLIKELY_LOGIT, np.float32)
    logits[_candidates(b"target", bytes(tokens[-ORDER:]))] = LETTER_LOGITS
    return logits


def check_logits(prompt, responses, tokens):
    context = [response["context_logits"] for response in responses if "context_logits" in response]
    assert len(context) == 1
    assert context[0].shape == (1, len(prompt), VOCAB_SIZE)
    assert np.allclose(context[0][0], [model_logits(prompt[: at + 1]) for at in range(len(prompt))])
    generation = np.concatenate([response["generation_logits"] for response in responses], axis=2)
    assert generation.shape == (1, 1, len(tokens), VOCAB_SIZE)
    assert generation.dtype == np.float32
    assert np.allclose(
        generation[0, 0], [model_logits([*prompt, *tokens[:at]]) for at in range(len(tokens))]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": [[0.9]], "presence_penalty": [[0.5]]}],
    ids=["greedy", "sampled"],
)
def test_logits_are_the_models_own_for_text_and_for_token_ids(client, service, stream, options):
    prompt = b"abcdefgh" * 5
    responses = client.ask(
        "tensorrt_llm",
        **{**token_request(prompt.decode(), 20), **ASK, **options, "streaming": [[stream]]},
    )
    tokens = np.concatenate([response["output_ids"] for response in responses], axis=2)[
        0, 0
    ].tolist()
    check_logits(list(prompt), responses, tokens)
    inputs = {
        "text_input": [[prompt.decode()]],
        "max_tokens": [[20]],
        **END,
        **ASK,
        **options,
        "stream": [[stream]],
    }
    responses = client.ask("ensemble", **inputs)
    check_logits(
        list(prompt),
        responses,
        list(b"".join(response["text_output"].item() for response in responses)),
    )
    assert not list(service.run_folders()[0].rglob("*.npy"))


def test_logits_come_over_http_flat_and_for_one_of_the_two_alone(service):
    flags = {"exclude_input_in_output": True, "return_generation_logits": True}
    status, reply = service.generate("abcdefgh", 3, **flags)
    assert status == 200
    tokens = list(reply["text_output"].encode())
    expected = np.concatenate([model_logits([*b"abcdefgh", *tokens[:at]]) for at in range(3)])
    assert np.allclose(reply["generation_logits"], expected)
    assert "context_logits" not in reply


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_come_with_the_likeliest_at_their_places(client, stream):
    flags = {
        "return_top_log_probs": [[3]],
        "return_log_probs": [[True]],
        "exclude_input_in_output": [[True]],
        "stream": [[stream]],
    }
    responses = client.ask(
        "tensorrt_llm_bls",
        text_input=[["abcdefgh"]],
        max_tokens=[[12]],
        temperature=[[1.0]],
        seed=[[3]],
        **END,
        **flags,
    )
    tokens = np.concatenate([response["output_tokens"] for response in responses], axis=1)[
        0
    ].tolist()
    assert b"".join(tokens) == b"".join(response["text_output"].item() for response in responses)
    top = np.concatenate([response["top_tokens"] for response in responses], axis=1)[0]
    values = np.concatenate([response["top_log_probs"] for response in responses], axis=1)[0]
    log_probs = np.concatenate([response["output_log_probs"] for response in responses], axis=2)[
        0, 0
    ]
    assert top.shape == values.shape == (12, 3)
    text = list(b"abcdefgh")
    for token, best, at_best, log_prob in zip(tokens, top, values, log_probs, strict=True):
        expected = model_logits(text).astype(np.float64)
        expected -= np.log(np.exp(expected).sum())
        assert at_best == pytest.approx(sorted(expected, reverse=True)[:3], abs=1e-5)
        assert [expected[letter[0]] for letter in best] == pytest.approx(at_best, abs=1e-5)
        assert log_prob == pytest.approx(expected[token[0]], abs=1e-5)
        text += token


def test_a_top_p_that_decays_to_nothing_leaves_the_likeliest_token(client):
    def tokens(**options):
        responses = client.ask(
            "tensorrt_llm",
            **{**token_request("abcdefgh", 30), "temperature": [[1.5]], "seed": [[5]], **options},
        )
        return responses[0]["output_ids"][0, 0].tolist()

    decayed = tokens(
        runtime_top_p=[[1.0]], runtime_top_p_decay=[[0.01]], runtime_top_p_min=[[0.001]]
    )
    assert decayed[:1] == tokens()[:1]
    assert decayed != tokens()
    assert all(
        token == model_logits(decayed[:at]).argmax()
        for at, token in enumerate(decayed)
        if at > len("abcdefgh")
    )
    assert tokens(runtime_top_p=[[1.0]], runtime_top_p_decay=[[1.0]]) == tokens()
