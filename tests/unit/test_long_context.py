"""A context of 128k tokens: what fits is served, what cannot fit is never tokenised."""

from dataclasses import replace
from pathlib import Path

import pytest

from backend import PROJECT_ROOT
from backend.config import load_config
from backend.core.preparation import Preparation
from backend.openai_frontend.front_end import BODY_BYTES_PER_TOKEN, MIN_BODY_BYTES
from backend.request import GenerationRequest, RequestError
from backend.sampling.guides import Grammars
from backend.tokenizer import FolderTokenizer, load_tokenizer
from tests.fakes.clients import Sink

CONTEXT = 131_072
TARGET = PROJECT_ROOT / "engines_build/drafts/tiny-target"


@pytest.fixture(scope="module")
def preparation():
    config = load_config(Path("tests/server/serving.json"))
    limits = replace(config.limits, max_context_tokens=CONTEXT, kv_cache_tokens=2 * CONTEXT)
    tokenizer = load_tokenizer(TARGET)
    return Preparation(
        replace(config, limits=limits),
        tokenizer,
        tokenizer.vocab_size,
        CONTEXT,
        lambda request: False,
        Grammars(tokenizer),
    )


@pytest.mark.parametrize("piece", [" the", "7"])
def test_a_prompt_that_fills_it_is_served(preparation, piece):
    tokens = [len(preparation.tokenizer.encode(piece * count)) for count in (100, 200)]
    count = (CONTEXT - 3) * 100 // (tokens[1] - tokens[0])
    session = preparation.session(GenerationRequest(piece * count, 1), Sink())
    assert CONTEXT - 4 <= session.sequence.prompt_tokens < CONTEXT


def test_a_longer_one_is_refused_by_its_tokens(preparation):
    with pytest.raises(RequestError, match="tokens is over the limit of 131071"):
        preparation.session(GenerationRequest(" the" * (CONTEXT + 9), 1), Sink())


@pytest.mark.parametrize("text", ["7" * 8_000_000, "x" * 8_000_000, "\u6f22" * 2_700_000])
def test_one_that_cannot_fit_is_refused_by_its_bytes(preparation, monkeypatch, text):
    monkeypatch.setattr(FolderTokenizer, "encode", None)
    with pytest.raises(RequestError, match="bytes is over the limit of 131071 tokens"):
        preparation.session(GenerationRequest(text, 1), Sink())


def test_a_body_of_the_front_end_has_room_for_it():
    assert MIN_BODY_BYTES >= BODY_BYTES_PER_TOKEN * CONTEXT
