"""A text that was broken off anywhere, and resumed, is the text of one server that wrote it all."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest

from backend.app import App, build
from backend.config import parse_config
from backend.request import ErrorCode, GenerationRequest, RequestError
from bench.in_process import generate
from policy import LatencyTable, NoSpeculation, RandomChoice
from tests.fakes.apps import fake_app, finish, submit
from tests.fakes.clients import Sink

PROMPT = tuple(b"one two one two one")
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4})
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "penalties": {
        "temperature": 0.9,
        "seed": 6,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
    },
    "decay": {"temperature": 1.2, "seed": 7, "top_p": 0.9, "top_p_decay": 0.8, "top_p_min": 0.1},
    "min_tokens": {"temperature": 1.2, "seed": 8, "min_tokens": 20},
    "schema": {"temperature": 1.0, "seed": 9, "guide_type": "json_schema", "guide": SCHEMA},
    "stop words": {"temperature": 1.0, "seed": 10, "stop_words": ("no such text", "\x01\x02\x03")},
}
TINY = {
    "limits": {"kv_cache_tokens": 4096, "max_context_tokens": 256},
    "threads": 1,
}
DRAFTS = [{"name": "lookup", "engine": "lookup"}]


def request(
    resumed: tuple[int, ...], tokens: int, options: dict[str, Any], prompt: tuple[int, ...] = PROMPT
) -> GenerationRequest:
    """Return what asks for the rest of a text of ``tokens``; some of it was written before."""
    return GenerationRequest(
        "",
        tokens - len(resumed),
        prompt_token_ids=prompt + resumed,
        resumed_tokens=len(resumed),
        **options,
    )


def texts(app: App, asked: list[GenerationRequest], policy: Any, together: int) -> list[list[int]]:
    """Return the tokens after the prompt, resumed ones included."""
    sessions = generate(app, asked, together, policy)
    return [session.sequence.tokens[session.sequence.prompt_tokens :] for session in sessions]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("policy", [NoSpeculation(), RandomChoice()], ids=["plain", "speculating"])
def test_a_text_of_the_fake_engine_goes_on_from_every_cut(
    options: dict[str, Any], policy: Any
) -> None:
    app = fake_app()
    (whole,) = texts(app, [request((), 24, options)], NoSpeculation(), 1)
    assert len(whole) > 4
    cuts = [request(tuple(whole[:cut]), 24, options) for cut in range(1, len(whole))]
    assert texts(app, cuts, policy, 4) == [whole] * len(cuts)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "dtype"), [("torch", "fp32"), ("openvino", "bf16")])
def test_24_texts_of_a_model_go_on_from_every_cut_among_others(engine: str, dtype: str) -> None:
    target = {"engine": engine, "model": "engines_build/drafts/tiny-target", "dtype": dtype}
    table = LatencyTable.synthetic("target", {1: 0.01, 64: 0.02})
    app = build(parse_config({"target": target, "drafts": DRAFTS, **TINY}), {"target": table})
    for number, (name, options) in zip(range(24), cycle(OPTIONS.items()), strict=False):
        prompt = (*PROMPT[: -1 - number // len(OPTIONS)], 40 + number)
        (whole,) = texts(app, [request((), 24, options, prompt)], NoSpeculation(), 1)
        cuts = [request(tuple(whole[:cut]), 24, options, prompt) for cut in range(1, len(whole))]
        for policy in (NoSpeculation(), RandomChoice()):
            assert texts(app, cuts, policy, 5) == [whole] * len(cuts), (number, name)
    app.close()


def refusal(app: App, asked: GenerationRequest) -> str:
    """Return why a request is refused."""
    with pytest.raises(RequestError) as refused:
        app.session(asked, Sink())
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    return str(refused.value)


def test_what_cannot_be_resumed_is_refused_by_field_and_value() -> None:
    app = fake_app()
    assert "resumed_tokens needs the prompt as token ids, got 3" in refusal(
        app, GenerationRequest("one two", 9, resumed_tokens=3)
    )
    assert "resumed_tokens must be below the 4 tokens of the prompt, got 4" in refusal(
        app, GenerationRequest("", 9, prompt_token_ids=(1, 2, 3, 4), resumed_tokens=4)
    )
    assert "resumed_tokens 3: the text ends after 2 of them (stop_words)" in refusal(
        app, request(tuple(b"xyz"), 9, {"stop_words": ("xy",)})
    )
    assert "resumed_tokens 2: the text ends after 1 of them (end_id)" in refusal(
        app, request((65, 66), 9, {"end_id": 65})
    )
    assert "resumed_tokens 2: they do not follow guided_decoding_guide" in refusal(
        app, request(tuple(b"no"), 9, {"guide_type": "json_schema", "guide": SCHEMA})
    )


def test_usage_counts_what_was_written_here_and_the_prompt_without_what_was_before() -> None:
    app = fake_app()
    sink = submit(app, request((65, 66, 67), 9, {"end_id": -1}))
    finish(app, sink)
    assert sink.usage is not None
    assert (sink.usage.input_tokens, sink.usage.output_tokens) == (len(PROMPT), 6)
