"""Preparation of a session from a request."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from backend.config import load_config
from backend.core.preparation import NO_END_ID, Preparation
from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer
from tests.fakes.clients import Sink

TOKENIZER = ByteTokenizer()
(END,) = TOKENIZER.end_ids
TOKENS = [*"é a".encode(), END, *b"bc"]


@pytest.fixture(scope="module")
def preparation():
    config = load_config(Path("tests/server/serving.json"))
    grammars = Grammars(TOKENIZER)
    return Preparation(config, TOKENIZER, TOKENIZER.vocab_size, 99, lambda _: False, grammars)


class Prefixed(ByteTokenizer):
    """Bytes after a token that begins a text."""

    def encode(self, text, add_special_tokens=True):
        """Return the tokens of a text."""
        return [*([END] if add_special_tokens else []), *super().encode(text)]


def preparing(tokenizer, rows, **settings):
    config = replace(load_config(Path("tests/server/serving.json")), **settings)
    grammars = Grammars(tokenizer, rows)
    return Preparation(config, tokenizer, rows, 99, lambda _: False, grammars)


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
def test_a_request_says_whether_its_text_gets_special_tokens(default, asked):
    preparation = preparing(Prefixed(), TOKENIZER.vocab_size, add_special_tokens=default)
    request = GenerationRequest("hi", 9, add_special_tokens=asked)
    begins = default if asked is None else asked
    assert preparation.session(request, Sink()).sequence.tokens == [*[END] * begins, *b"hi"]


BEYOND = ByteTokenizer(
    vocab_size=260,
    token_bytes=(*TOKENIZER.token_bytes, b"", b"", b"\xe2"),
    special_tokens={"<|end|>": END, "<|a|>": 257, "<|b|>": 258},
)


class Adding:
    """A tokenizer with tokens that its model, of 257 rows, lacks."""

    def __getattr__(self, name):
        return getattr(BEYOND, name)

    def encode(self, text, add_special_tokens=True):
        """Return the tokens of a text."""
        del add_special_tokens
        parts = re.split("(<.a.>|<.b.>|%)", text)
        known = {"<|a|>": [257], "<|b|>": [258], "%": [259]}
        return [token for part in parts for token in known.get(part, [*part.encode()])]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("x<|a|>", {}, r"text_input has the token '<\|a\|>' of id 257, .* only ids below 257"),
        ("<|b|>y<|a|>", {}, r"text_input has the token '<\|b\|>' of id 258"),
        ("%", {}, "text_input has the token '\ufffd' of id 259"),
        ("a", {"bad_words": ("b", "c<|a|>")}, r"bad_words has the token '<\|a\|>'"),
        (
            "a",
            {"embedding_bias_words": ("<|b|>",), "embedding_bias_weights": (1.0,)},
            r"embedding_bias_words has the token '<\|b\|>'",
        ),
        ("a", {"end_id": 258}, "end_id must be -1 or a token id below 257, got 258"),
        (
            "a",
            {"stop_token_ids": (258,)},
            "stop_token_ids must contain token ids below 257, got 258",
        ),
        ("a", {"bias": ((258, 1.0),)}, "logit_bias_ids must contain token ids below 257, got 258"),
    ],
)
def test_a_token_that_the_model_has_no_row_for_is_refused_by_name(text, options, words):
    with pytest.raises(RequestError, match=words) as error:
        preparing(Adding(), 257).session(GenerationRequest(text, 9, **options), Sink())
    assert error.value.code == ErrorCode.INVALID_ARGUMENT


def test_where_the_model_lacks_some_of_the_tokens_texts_without_them_are_served():
    request = GenerationRequest("a", 9, guide_type="json", stop_words=("<|a|>",), min_tokens=2)
    sampling = preparing(Adding(), 257).session(request, Sink()).sequence.sampling
    assert len(sampling.guide.mask([])) == 257


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"end_id": NO_END_ID}, "é abc"),
        ({"end_id": NO_END_ID, "skip_special_tokens": False}, "é a<|end|>bc"),
        ({"skip_special_tokens": False}, "é a"),
        ({"end_id": NO_END_ID, "stop_words": ("a<|end|>b",)}, "é "),
        ({"end_id": NO_END_ID, "stop_words": ("a<|end|>b",), "skip_special_tokens": False}, "é "),
        (
            {"end_id": NO_END_ID, "stop_words": ("ab",), "skip_special_tokens": False},
            "é a<|end|>bc",
        ),
    ],
)
def test_special_tokens_are_text_where_a_request_asks_for_them(preparation, options, text):
    session = preparation.session(GenerationRequest("hi", 9, stream=True, **options), Sink())
    session.commit(TOKENS)
    assert session.pop_delta().text == text
