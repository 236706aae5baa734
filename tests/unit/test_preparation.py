"""Preparation of a session from a request."""

from pathlib import Path

import pytest

from backend.config import load_config
from backend.core.preparation import NO_END_ID, Preparation
from backend.request import GenerationRequest
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
