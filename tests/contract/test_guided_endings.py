"""The shipped model ends its JSON by itself: it does not write white space until its text is
full.
"""

import json

import pytest

from backend.app import build
from backend.config import parse_config
from backend.openai_frontend.guides import guide_of
from backend.request import FinishReason, GenerationRequest
from bench.in_process import generate
from engines_build.prepare import bring_embedded_model
from policy import FixedLength, LatencyTable
from tests.unit.test_guided_blanks import SCHEMAS, body

pytestmark = pytest.mark.slow

MOST_TOKENS = 200
ENDLESS = {
    *("numbers", "arrays", "tuple", "map", "patterns", "recursion"),
    *("anything", "empty", "true", "all of"),
}
"""Schemas that set no bound to digits, elements, names or depth."""
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASKS = ("Fill it in.", "Give me an example as JSON.")
WAYS = ("loose", "strict", "named call", "required call")
CONFIG = {
    "target": {"engine": "openvino", "model": "smollm2-135m-instruct"},
    "drafts": [{"name": "lookup", "engine": "lookup"}],
    "limits": {"kv_cache_tokens": 32_768},
    "threads": 2,
}


@pytest.fixture(scope="module")
def app():
    bring_embedded_model()
    made = build(parse_config(CONFIG), {"target": LatencyTable.synthetic("target", {1: 0.02})})
    yield made
    made.close()


def requests(options):
    for name in sorted(SCHEMAS.keys() - ENDLESS):
        schema, _ = SCHEMAS[name]
        for ask in ASKS:
            for way in WAYS:
                _, guide = guide_of(body(schema, way))
                kind, text = guide.values()
                request = GenerationRequest(
                    PROMPT.format(ask), MOST_TOKENS, guide_type=kind, guide=text, **options
                )
                yield (name, ask, way), request


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "seed": 1}], ids=["greedy", "sampled"]
)
def test_every_answer_ends_and_is_json(app, options):
    names, asked = zip(*requests(options), strict=True)
    sessions = generate(app, list(asked), 16, FixedLength("lookup", 2))
    for name, session in zip(names, sessions, strict=True):
        assert session.finish_reason == FinishReason.END_ID, name
        ids = session.sequence.tokens[session.sequence.prompt_tokens : -1]
        text = b"".join(app.tokenizer.token_bytes[token] for token in ids)
        assert json.loads(text) != "", name
