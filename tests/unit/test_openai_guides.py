"""The grammars of the OpenAI front end: what they let a text be."""

import json

import pytest

from backend.openai_frontend.errors import TOOL_FIELDS, ApiError, upstream_error
from backend.openai_frontend.guides import guide_of
from backend.openai_frontend.schema import ChatRequest
from backend.request import RequestError
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
(END,) = BYTES.end_ids
GRAMMARS = Grammars(BYTES)
SEAT = {
    "type": "object",
    "properties": {"row": {"type": "integer"}},
    "required": ["row"],
    "additionalProperties": False,
}
COLUMN = {
    "type": "object",
    "properties": {"column": {"enum": ["a", "b"]}},
    "required": ["column"],
    "additionalProperties": False,
}


def with_seat(reference, **more):
    """Return the schema of {"seat": ...} by a reference."""
    return {
        "type": "object",
        "properties": {"seat": {"$ref": reference}},
        "required": ["seat"],
        "additionalProperties": False,
        **more,
    }


NESTED = with_seat("#/$defs/Seat", **{"$defs": {"Seat": SEAT}})
TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["v", "child"],
    "additionalProperties": False,
}


def chat(**more):
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **more)


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allows(body, text):
    """Return whether the grammar of a body takes a whole text."""
    _, guide = guide_of(body)
    made = GRAMMARS.guide(
        guide["guided_decoding_guide_type"], guide["guided_decoding_guide"], BYTES.end_ids
    )
    tokens = list(text.encode())
    return made.count_allowed([], [*tokens, END]) == len(tokens) + 1


def calls(tools, arguments, name="f"):
    """Return whether a call that must come may have these arguments; named and unnamed agree."""
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": name}})
    required = chat(tools=tools, tool_choice="required")
    taken = allows(required, f'{{"name": "{name}", "parameters": {arguments}}}')
    assert taken == allows(named, arguments)
    return taken


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (NESTED, {"seat": {"row": 1}}, {"seat": {"column": "a"}}),
        (
            with_seat("#/definitions/Seat", definitions={"Seat": SEAT}),
            {"seat": {"row": 1}},
            {"seat": 1},
        ),
        (
            {
                **with_seat("#/definitions/Seat", definitions={"Seat": SEAT}),
                "$schema": "http://json-schema.org/draft-04/schema#",
            },
            {"seat": {"row": 1}},
            {"seat": 1},
        ),
        (
            {
                "type": "object",
                "properties": {"from": SEAT, "to": {"$ref": "#/properties/from"}},
                "required": ["from", "to"],
                "additionalProperties": False,
            },
            {"from": {"row": 1}, "to": {"row": 2}},
            {"from": {"row": 1}, "to": 2},
        ),
        (
            TREE,
            {"v": 1, "child": {"v": 2, "child": None}},
            {"v": 1, "child": {"name": "f", "parameters": {"v": 2, "child": None}}},
        ),
        (
            {
                "type": "object",
                "properties": {"parameters": SEAT, "b": {"$ref": "#/properties/parameters"}},
                "required": ["parameters", "b"],
                "additionalProperties": False,
            },
            {"parameters": {"row": 1}, "b": {"row": 2}},
            {"parameters": {"row": 1}, "b": {"parameters": {"row": 2}}},
        ),
        (
            {
                "type": "object",
                "properties": {"$ref": {"type": "string"}, "$defs": {"const": "#/$defs/Seat"}},
                "required": ["$ref", "$defs"],
                "additionalProperties": False,
            },
            {"$ref": "#", "$defs": "#/$defs/Seat"},
            {"$ref": 1, "$defs": "#/$defs/Seat"},
        ),
        (
            with_seat("#seat", **{"$defs": {"Seat": {"$anchor": "seat", **SEAT}}}),
            {"seat": {"row": 1}},
            {"seat": {}},
        ),
        (
            with_seat("seat.json", **{"$defs": {"Seat": {"$id": "seat.json", **SEAT}}}),
            {"seat": {"row": 1}},
            {"seat": {}},
        ),
        (
            with_seat(
                "#/$defs/Place",
                **{"$defs": {"Place": {"anyOf": [{"$ref": "#/$defs/Seat"}]}, "Seat": SEAT}},
            ),
            {"seat": {"row": 1}},
            {"seat": {}},
        ),
        (
            with_seat("#/$defs/a~1b~0c", **{"$defs": {"a/b~c": SEAT}}),
            {"seat": {"row": 1}},
            {"seat": {}},
        ),
    ],
    ids=[
        *("defs", "draft 7", "draft 4", "zod", "itself", "parameters"),
        *("names", "anchor", "id", "nested", "escaped"),
    ],
)
def test_references_in_a_tool_mean_what_they_mean_in_its_schema(parameters, right, wrong):
    others = [tool(NESTED, "other"), tool(None, "none")]
    for tools in ([tool(parameters)], [others[0], tool(parameters), others[1]]):
        assert calls(tools, right)
        assert not calls(tools, wrong)


@pytest.mark.parametrize("more", [{}, {"$id": "https://example.com/arguments"}])
def test_tools_may_use_one_name_for_different_definitions(more):
    tools = [
        tool(with_seat("#/$defs/Seat", **{"$defs": {"Seat": kind}}, **more), name)
        for kind, name in ((SEAT, "row"), (COLUMN, "column"))
    ]
    assert calls(tools, {"seat": {"row": 1}}, "row")
    assert calls(tools, {"seat": {"column": "b"}}, "column")
    assert not calls(tools, {"seat": {"row": 1}}, "column")
    assert not calls(tools, {"seat": {"column": "b"}}, "row")


def test_a_call_may_have_blanks_where_json_may_and_what_marks_a_grammar_is_only_text():
    described = {**NESTED, "description": 'root ::= x // y # z %ignore \\ " \n é'}
    spaced = '{\n "name" :\t"f",\r\n"parameters":{ "seat" : {"row": 1 } } }'
    assert allows(chat(tools=[tool(described)], tool_choice="required"), spaced)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object", "properties": {}},
        {"title": "Ping", "type": "object", "properties": {}, "required": []},
    ],
)
def test_a_function_without_parameters_is_called_with_none(parameters):
    tools = [tool(parameters), tool(NESTED, "other")]
    assert calls(tools, "{}")
    for more in ('{"a": 1}', "{ }", "{\n}"):
        assert not calls(tools, more)
    absent = {"type": "function", "function": {"name": "f"}}
    assert calls([absent], "{}")


def test_a_schema_that_cannot_be_served_is_named_by_its_tool():
    tools = [tool(NESTED), tool(with_seat("#/$defs/None"), "g")]
    with pytest.raises(RequestError) as raised:
        allows(chat(tools=tools, tool_choice="required"), "")
    error = upstream_error(400, str(raised.value), TOOL_FIELDS)
    assert error.param == "tools[1].function.parameters"
    assert str(error) == (
        "tools[1].function.parameters is not a supported schema: "
        "Pointer '/$defs/None' does not exist"
    )


def test_alternatives_that_may_both_hold_are_named_by_field_and_place():
    either = {"properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    for body, field in (
        (chat(tools=[tool(NESTED), tool(either, "g")], tool_choice="required"), "tools[1]"),
        (chat(response_format=form(either)), "response_format"),
    ):
        with pytest.raises(
            ApiError, match="oneOf at #/properties/x: alternatives 1 and 2"
        ) as error:
            guide_of(body)
        assert error.value.status == 400
        assert error.value.param.startswith(field)


def test_a_response_format_is_its_own_grammar():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TREE}}
    assert allows(chat(response_format=form), '{"v": 1, "child": null}')
    assert allows(chat(response_format={"type": "json_object"}), '{"a": [1]}')
    assert guide_of(chat(response_format={"type": "text"})) == (None, {})
    assert guide_of(chat()) == (None, {})


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
BASE = {"$defs": {"A": NAMED, "B": OTHER}}


def form(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (NAMED, {"a": 1}, {"a": 1, "c": 1}),
        ({"properties": {"a": NAMED}}, {"a": {"a": 1}}, {"a": {"a": 1, "c": 1}}),
        ({"type": "array", "items": NAMED}, [{"a": 1}], [{"a": 1, "c": 1}]),
        ({"anyOf": [NAMED, OTHER]}, {"b": 1}, {"b": 1, "a": 1}),
        ({"type": ["object", "null"], "properties": {"a": {}}}, None, {"c": 1}),
        ({"type": "object"}, {}, {"c": 1}),
        ({**BASE, "$ref": "#/$defs/A"}, {"a": 1}, {"a": 1, "c": 1}),
        ({**BASE, "allOf": [{"$ref": "#/$defs/A"}]}, {"a": 1}, {"a": 1, "c": 1}),
        (
            {**BASE, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            {"a": 1, "b": 2},
            {"a": 1, "b": 2, "c": 3},
        ),
        (
            {**BASE, "properties": {"c": {}}, "anyOf": [NAMED, {"$ref": "#/$defs/B"}]},
            {"c": 1, "b": 2},
            {"c": 1, "b": 2, "d": 3},
        ),
        (
            {
                "$ref": "#/components/Tree",
                "components": {
                    "Tree": {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/components/Tree"}},
                    }
                },
            },
            {"next": {"next": {}}},
            {"next": {"c": 1}},
        ),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
            {"x1": 1},
            {"y1": 1},
        ),
        (
            {"type": "object", "properties": {"properties": NAMED, "enum": {}}},
            {"properties": {"a": 1}, "enum": 1},
            {"properties": {"a": 1, "c": 1}},
        ),
    ],
    ids=[
        *("plain", "nested", "items", "any", "nullable", "empty", "ref", "one part", "parts"),
        *("parts and own", "tree", "patterns", "names"),
    ],
)
def test_strict_closes_objects_that_are_not_declared_open(schema, right, wrong):
    strict = chat(response_format=form(schema, strict=True))
    assert allows(strict, json.dumps(right))
    assert not allows(strict, json.dumps(wrong))
    for loose in (form(schema), form(schema, strict=False), form(schema, strict=None)):
        assert allows(chat(response_format=loose), json.dumps(wrong))


@pytest.mark.parametrize("value", [True, {"type": "integer"}])
def test_strict_leaves_open_what_is_declared_open(value):
    schema = {**NAMED, "additionalProperties": value}
    text = '{"a": 1, "b": 2, "c": 3}'
    for kept in (schema, {"allOf": [schema, OTHER]}, {**schema, "anyOf": [OTHER]}):
        assert allows(chat(response_format=form(kept, strict=True)), text)
    for whole in ({"const": {"a": 1}}, {"type": "object", "enum": [{"a": 1}]}, True, {}):
        assert allows(chat(response_format=form(whole, strict=True)), '{"a": 1}')


def test_strict_closes_the_arguments_of_a_function():
    strict = tool({**with_seat("#/$defs/A"), **BASE})
    strict["function"]["strict"] = True
    assert calls([strict], {"seat": {"a": 1}})
    assert not calls([strict], {"seat": {"a": 1, "c": 1}})
    assert calls([tool({**with_seat("#/$defs/A"), **BASE})], {"seat": {"a": 1, "c": 1}})


def deep(levels):
    schema = NAMED
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(levels):
    """Return a schema that would be of 2 ** levels parts, were references put in place."""
    parts = {f"A{n}": {"allOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/A0", "$defs": {**parts, f"A{levels}": NAMED}}


@pytest.mark.parametrize(
    "schema",
    [
        *({"allOf": 5, "anyOf": 5}, {"properties": 5, "$ref": 5}, {"$ref": "#", "allOf": [{}, 5]}),
        *(deep(450), {"allOf": [{"$ref": "#/allOf/0"}, NAMED]}, {"properties": [1], "items": 5}),
    ],
)
def test_a_strict_schema_that_is_none_is_refused_like_any(schema):
    with pytest.raises((RequestError, ApiError), match=r"guided_decoding_guide|response_format"):
        allows(chat(response_format=form(schema, strict=True)), "")


def test_references_are_not_multiplied():
    _, guide = guide_of(chat(response_format=form(doubling(60), strict=True)))
    assert len(guide["guided_decoding_guide"]) < 20_000
