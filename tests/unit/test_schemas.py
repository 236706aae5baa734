"""JSON schemas as the parser of grammars gets them: alternatives that exclude each other."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.request import RequestError
from backend.sampling.guides import Grammars
from backend.sampling.schemas import prepare_schema
from backend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
(END,) = BYTES.end_ids
GRAMMARS = Grammars(BYTES)
DEFINITIONS = {
    "Named": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
    "Other": {"type": "object", "properties": {"a": {"const": "y"}}, "required": ["a"]},
}
KINDS = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
    "number": (int, float),
}


def needs(*names, **more):
    return {"required": [*names], "type": "object", **more}


def follows(schema, value) -> bool:
    """Whether a value is one of a schema's, by the specification."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        schema = {**schema, "allOf": [DEFINITIONS[schema["$ref"].rpartition("/")[2]]]}
    checks = [
        *(follows(part, value) for part in schema.get("allOf", ())),
    ]
    if "anyOf" in schema:
        checks.append(any(follows(part, value) for part in schema["anyOf"]))
    if "oneOf" in schema:
        checks.append(sum(follows(part, value) for part in schema["oneOf"]) == 1)
    if "const" in schema:
        checks.append(json.dumps(value) == json.dumps(schema["const"]))
    if "enum" in schema:
        checks.append(json.dumps(value) in map(json.dumps, schema["enum"]))
    if "type" in schema:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        known = "number" if schema["type"] == "integer" else schema["type"]
        checks.append(number if known == "number" else isinstance(value, KINDS[known]))
        checks.append(schema["type"] != "integer" or value == int(value) if number else True)
    if isinstance(value, str):
        checks.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99))
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        checks += [name in value for name in schema.get("required", ())]
        checks += [follows(properties.get(name, others), one) for name, one in value.items()]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        checks.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        checks.append(schema.get("exclusiveMinimum", value - 1) < value)
    return all(checks)


def allows(schema, value) -> bool:
    """Whether the grammar of a schema takes a value."""
    guide = GRAMMARS.guide("json_schema", json.dumps(schema), BYTES.end_ids)
    tokens = list(json.dumps(value).encode())
    return guide.count_allowed([], [*tokens, END]) == len(tokens) + 1


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"oneOf": [{"$ref": "#/$defs/Named"}, {"type": "null"}]}, [{"a": "x"}, None], [1]),
        ({"oneOf": [{"$ref": "#/$defs/Named"}, {"$ref": "#/$defs/Other"}]}, [{"a": "y"}], [None]),
        ({"oneOf": [{"const": 1}, {"const": 2, "title": "two"}]}, [1, 2], [3]),
        ({"oneOf": [{"const": [1, {"a": 2}]}, {"const": [1, {"a": 3}]}]}, [[1, {"a": 3}]], [[1]]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3, "3"]}]}, [1, "3"], [4]),
        (
            {"properties": {"x": {"oneOf": [{"$ref": "#/$defs/Named"}, {"type": "null"}]}}},
            [{"x": {"a": "x"}}, {"x": None}],
            [{"x": {"a": "y"}}],
        ),
        ({"properties": {"oneOf": {"type": "null"}}, "enum": [{"oneOf": 5}]}, [], []),
        ({"const": {"oneOf": [{"type": "null"}, {"type": "null"}]}}, [], [None]),
    ],
)
def test_alternatives_that_exclude_each_other_are_served(schema, right, wrong):
    schema = {**schema, "$defs": DEFINITIONS}
    for value in right:
        assert follows(schema, value)
        assert allows(schema, value), value
    for value in wrong:
        assert not allows(schema, value), value


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}],
        [needs("a"), needs("b")],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 3}],
        [{"const": 1}, {"const": 1.0}],
        [needs("a"), needs("a", "b")],
        [{"required": ["a"]}, {"required": ["b"]}],  # no object follows both
        [{"$ref": "#"}, {"type": "null"}],
        [True, {"type": "null"}],
        [{"type": "array", "items": {"type": "null"}}, {"type": "array", "maxItems": 3}],
    ],
)
@pytest.mark.parametrize("place", ["#", "#/properties/a~ b/items"])
def test_alternatives_that_may_both_hold_are_refused_by_their_place(options, place):
    schema = {"oneOf": [{"const": "first"}, *options]}
    if place != "#":
        schema = {"properties": {"a~ b": {"items": schema}}}
        options = [{"$ref": place} if "$ref" in str(o) else o for o in options]
    with pytest.raises(RequestError) as raised:
        GRAMMARS.guide("json_schema", json.dumps(schema), BYTES.end_ids)
    assert "coerce_one_of" not in str(raised.value)
    assert f"served: oneOf at {place}: alternatives" in str(raised.value)
    assert "write anyOf" in str(raised.value)


def test_an_option_of_the_parser_in_a_schema_is_not_heeded():
    same = {"oneOf": [{"type": "null"}, {"type": "null"}]}
    for option in ({"coerce_one_of": True}, {"lenient": True}, {"no such": 1}, 5):
        with pytest.raises(RequestError, match="oneOf at #"):
            GRAMMARS.guide("json_schema", json.dumps({**same, "x-guidance": option}), BYTES.end_ids)


def test_a_time_has_no_endless_digits():
    for form, second in (("date-time", "2024-02-03T10:11:12."), ("time", "10:11:12.")):
        schema = {"type": "string", "format": form}
        assert allows(schema, second + "123456789+01:00")
        assert not allows(schema, second + "1" * 20 + "Z")
        assert allows({**schema, "maxLength": 60}, second + "1" * 20 + "Z")


names = st.sampled_from("ab")
leaves = st.sampled_from(
    [
        *({"type": kind} for kind in ("null", "boolean", "string", "integer", "number")),
        *({"const": value} for value in ("x", 1, 2, True, None, {"a": "x"})),
        *({"enum": values} for values in (["x", 1], [1, 2], [True, "y"])),
        *({"$ref": f"#/$defs/{name}"} for name in DEFINITIONS),
        {"type": "integer", "maximum": 1},
        {"type": "number", "exclusiveMinimum": 1},
        {"type": "string", "maxLength": 1},
        {"type": "string", "minLength": 2},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(names, inner, max_size=2),
                "required": st.lists(names, unique=True),
            },
            optional={"additionalProperties": st.just(False)},
        ),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=2, max_size=3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=4,
)
SCALARS = [None, True, "x", "xx", "y", 1, 2, 1.5]
VALUES = [
    *SCALARS,
    {},
    *({name: one} for name in "ab" for one in (*SCALARS, {"a": "x"}, {"b": 1})),
    *({"a": one, "b": two} for one, two in product((None, "x", "y", 1, 2), repeat=2)),
]


@pytest.mark.medium
@given(schema=st.fixed_dictionaries({"oneOf": st.lists(schemas, min_size=2, max_size=3)}))
def test_no_value_is_allowed_that_the_schema_does_not_allow(schema):
    schema = {**schema, "$defs": DEFINITIONS}
    try:
        prepared = prepare_schema(schema)
    except ValueError:  # refused
        return
    as_any = json.loads(json.dumps(prepared).replace('"oneOf"', '"anyOf"'))
    for value in VALUES:
        assert follows(schema, value) or not follows(as_any, value), value
