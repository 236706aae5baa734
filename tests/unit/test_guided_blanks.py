"""White space between the tokens of guided JSON: a model that may write it without end does."""

import json

import pytest

from backend.openai_frontend.guides import guide_of
from backend.openai_frontend.reading import FORMATS, Channels, Reasoning
from backend.openai_frontend.schema import ChatRequest
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
(END,) = BYTES.end_ids
GRAMMARS = Grammars(BYTES)
FEW = 12
FRAMES = {
    "bare": (None, ""),
    "open reasoning": (Reasoning(FORMATS[0], True), "Hm.\n</think>"),
    "closed reasoning": (Reasoning(FORMATS[0], False), "<think>Hm.\n</think>"),
    "channels": (
        Channels(True),
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant",
    ),
}


def closed(properties, **more):
    names = [*properties]
    more = {"required": names, "additionalProperties": False, **more}
    return {"type": "object", "properties": properties, **more}


SHORT, FLAG = {"type": "string", "maxLength": 5}, {"type": "boolean"}
SCHEMAS = {
    "string": (closed({"x": SHORT}), {"x": "abc"}),
    "numbers": (closed({"x": {"type": "number"}, "y": {"type": "integer"}}), {"x": 1.5, "y": -2}),
    "const object": (closed({"x": {"const": {"a": [1, "z"]}}}), {"x": {"a": [1, "z"]}}),
    "enum of objects": (closed({"x": {"enum": [{"a": [1]}, {"b": [2]}]}}), {"x": {"b": [2]}}),
    "nullable": (closed({"x": {"anyOf": [SHORT, {"type": "null"}]}}), {"x": None}),
    "one of": (
        closed(
            {
                "x": {
                    "oneOf": [
                        closed({"a": {"const": 1}}),
                        closed({"a": {"const": 2}}),
                        {"const": 1},
                    ]
                }
            }
        ),
        {"x": {"a": 2}},
    ),
    "odd names": (
        closed({"näme 日本": FLAG, 'a"b\\c\n': FLAG}),
        {"näme 日本": True, 'a"b\\c\n': False},
    ),
    "arrays": (
        closed({"x": {"type": "array", "items": closed({"y": SHORT})}}),
        {"x": [{"y": "a"}, {"y": ""}]},
    ),
    "tuple": ({"type": "array", "prefixItems": [FLAG], "items": {"type": "null"}}, [True, None]),
    "optional": (closed({"a": FLAG, "b": FLAG}, required=["b"]), {"a": True, "b": False}),
    "map": ({"type": "object", "additionalProperties": FLAG}, {"any name": True, "b": False}),
    "patterns": (
        {"type": "object", "patternProperties": {"^k": FLAG}, "additionalProperties": False},
        {"k1": True},
    ),
    "reference": (
        {"$defs": {"P": closed({"n": SHORT})}, **closed({"a": {"$ref": "#/$defs/P"}})},
        {"a": {"n": "x"}},
    ),
    "recursion": (
        closed({"v": FLAG, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        {"v": True, "next": {"v": False, "next": None}},
    ),
    "all of": ({"allOf": [{"required": ["a"]}, {"properties": {"a": FLAG}}]}, {"a": True}),
    "anything": ({"type": "object"}, {"a": [1, {"b": None}]}),
    "empty": ({}, {"a": [[], {}, ""]}),
    "true": (True, [{"a": 1.5}]),
    "own settings": (
        {**closed({"x": FLAG}), "x-guidance": {"whitespace_flexible": True}},
        {"x": True},
    ),
}


def body(schema, way):
    more = {
        "named call": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "required call": {"tool_choice": "required"},
    }.get(way, {})
    if more:
        function = {"name": "f", "parameters": schema, "strict": False}
        more["tools"] = [
            {"type": "function", "function": {"name": "g", "parameters": {}}},
            {"type": "function", "function": function},
        ]
    elif way == "json_object":
        more = {"response_format": {"type": "json_object"}}
    else:
        form = {"name": "x", "schema": schema, "strict": way == "strict"}
        more = {"response_format": {"type": "json_schema", "json_schema": form}}
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **more)


def between_tokens(text, start):
    """Yield the beginnings of a text, from ``start`` on, that do not end inside of a string."""
    inside = escaped = False
    for end in range(start, len(text) + 1):
        if not inside:
            yield text[:end]
        letter = text[end : end + 1]
        if inside and (escaped or letter == "\\"):
            escaped = not escaped
        elif letter == '"':
            inside = not inside


def check(guide, text, start=0):
    """Check that a grammar takes a text, and in no place of it many blanks."""
    tokens = list(text.encode())
    assert guide.count_allowed([], [*tokens, END]) == len(tokens) + 1, text
    places = [list(part.encode()) for part in between_tokens(text, start)]
    for blanks in (" ", "\n", "\t", "\r\n", "\n ", "\n\t", "\n" + " " * FEW):
        many = list((blanks * (FEW + 1)).encode())
        assert all(guide.count_allowed(place, many) <= FEW for place in places), blanks
    assert guide.mask(tokens).nonzero()[0].tolist() == [END]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_allows_few_blanks_between_tokens(name):
    schema, value = SCHEMAS[name]
    guide = GRAMMARS.guide("json_schema", json.dumps(schema), BYTES.end_ids)
    check(guide, json.dumps(value, ensure_ascii=False))
    check(guide, json.dumps(value, ensure_ascii=False, indent=2))


def test_json_without_a_schema_allows_few_blanks_between_tokens():
    guide = GRAMMARS.guide("json", "", BYTES.end_ids)
    for indent in (None, 2):
        check(guide, json.dumps({"a": [1, {"b": "c"}], "d": None}, indent=indent))


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("way", ["loose", "strict", "json_object", "named call", "required call"])
@pytest.mark.parametrize("name", ["string", "const object", "one of", "reference"])
def test_an_answer_of_the_openai_port_allows_few_blanks_between_tokens(name, way, frame):
    schema, value = SCHEMAS[name]
    reading, before = FRAMES[frame]
    _, guide = guide_of(body(schema, way), reading)
    made = GRAMMARS.guide(*guide.values(), BYTES.end_ids)
    arguments = json.dumps(value, ensure_ascii=False)
    if frame == "channels":
        to = "commentary to=functions.f <|constrain|>json" if "call" in way else "final"
        before += f"<|channel|>{to}<|message|>"
    elif way == "required call":
        arguments = f'{{"name": "f", "parameters": {arguments}}}'
    check(made, before + arguments, len(before))
