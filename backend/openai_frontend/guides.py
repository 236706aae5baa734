"""The grammar that an answer must follow: of a ``response_format``, or of a call that must come.

In ``strict`` schemas objects have no properties but those that their schema names. xgrammar, the
default of TensorRT-LLM and vLLM, reads every schema so: an object schema that gives neither
``additionalProperties`` nor ``unevaluatedProperties`` allows no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from backend.openai_frontend.bodies import Function
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.reading import CHANNEL, CONSTRAIN, END, MESSAGE, START, Channels, Frame
from backend.openai_frontend.schema import ChatRequest
from backend.sampling.schemas import BLANKS, DATA, MAPS, of_kind, prepare_schema, resolve

_PARTS = ("allOf", "anyOf", "oneOf")
_DECLARED_OPEN = ("additionalProperties", "unevaluatedProperties")

_Names = dict[tuple[str, str], None]
"""(keyword, name) of properties, in order."""
NO_ARGUMENTS = "{}"
"""The arguments of a function that names no parameters."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})
_ANNOTATIONS = {"$schema", "title", "description", "type", "properties", "required"}
_TERMINALS = [rf"BLANKS: /{BLANKS}/", r"GAP: /[ \n\r\t]{1,4}/"]
"""White space in a call, and around reasoning, where two line ends are usual."""


def close_objects(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema whose objects are closed where it does not say otherwise.

    An object that is put together, by ``allOf`` or by ``anyOf`` next to its own ``properties``, has
    the properties of all its parts.
    """
    closer = _Closer(schema)
    try:
        closed: dict[str, Any] | bool = closer.close(schema)
    except RecursionError:  # far deeper than the parser takes: it refuses the schema
        return schema
    if isinstance(closed, dict) and closer.definitions:
        closed["$defs"] = {**of_kind(dict, closed, "$defs"), **closer.definitions}
    return closed


class _Closer:
    """``definitions`` are the parts that were referred to, by their names in ``$defs``."""

    def __init__(self, root: Any) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._open_names: dict[str, str] = {}
        self._known_names: dict[str, _Names | None] = {}

    def close(self, schema: Any) -> Any:
        """Return a schema with all its objects closed."""
        if not isinstance(schema, dict):
            return schema
        if _is_put_together(schema):
            return self._close_parts(schema)
        closed = {key: self._close_value(key, value) for key, value in schema.items()}
        parts = any(key in schema for key in (*_PARTS, "$ref", "const", "enum"))
        if _is_object(schema) and not parts and not any(key in schema for key in _DECLARED_OPEN):
            closed["additionalProperties"] = False
        return closed

    def _close_value(self, key: str, value: Any) -> Any:
        if key in DATA:
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self.close(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.close(inner) for inner in value]
        return self.close(value)

    def _close_parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Close an object that is put together around its parts, which stay open."""
        opened: dict[str, Any] = self._open(schema)
        names = self._names(schema)
        if names is None or any(key in schema for key in _DECLARED_OPEN):
            return opened
        for key in ("properties", "patternProperties"):
            others = {name: True for kind, name in names if kind == key}
            if others:
                opened[key] = {**others, **of_kind(dict, opened, key)}
        return {**opened, "additionalProperties": False}

    def _open(self, schema: Any) -> Any:
        """Return a part with only the objects in its properties closed."""
        if not isinstance(schema, dict):
            return schema
        opened = {
            key: [self._open(part) for part in value]
            if key in _PARTS and isinstance(value, list)
            else self._close_value(key, value)
            for key, value in schema.items()
        }
        if (target := resolve(self._root, schema.get("$ref"))) is not None:
            opened["$ref"] = f"#/$defs/{self._open_reference(schema['$ref'], target)}"
        return opened

    def _open_reference(self, reference: str, target: Any) -> str:
        """Return the name of an open copy of what is referred to."""
        if (name := self._open_names.get(reference)) is None:
            name = self._open_names[reference] = f"spindle_open_{len(self._open_names)}"
            self.definitions[name] = self._open(target)
        return name

    def _names(self, schema: Any) -> _Names | None:
        """Return the properties of an object and its parts, in order; None where one of them says
        that it is open, or is not known.
        """
        if not isinstance(schema, dict):
            return {}
        if any(schema.get(key, False) is not False for key in _DECLARED_OPEN):
            return None
        names: _Names = {
            (key, name): None
            for key in ("properties", "patternProperties")
            for name in of_kind(dict, schema, key)
        }
        inner = [self._names(part) for key in _PARTS for part in of_kind(list, schema, key)]
        if "$ref" in schema:
            inner.append(self._names_of(schema["$ref"]))
        for more in inner:
            if more is None:
                return None
            names |= more
        return names

    def _names_of(self, reference: Any) -> _Names | None:
        """Return ``_names`` of what is referred to; an object cannot be a part of itself."""
        if not isinstance(reference, str):
            return None
        if reference not in self._known_names:
            self._known_names[reference] = None
            target = resolve(self._root, reference)
            self._known_names[reference] = None if target is None else self._names(target)
        return self._known_names[reference]


def _is_object(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    if kind is None:
        return "properties" in schema or "patternProperties" in schema
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _is_put_together(schema: dict[str, Any]) -> bool:
    """Return whether an object's properties come from more than one place."""
    if any(key in schema for key in ("const", "enum")):
        return False
    places = [
        "properties" in schema or "patternProperties" in schema,
        "$ref" in schema,
        "anyOf" in schema,
        "oneOf" in schema,
        *(True for _ in of_kind(list, schema, "allOf")),
    ]
    return sum(places) > 1


def guide_of(
    body: ChatRequest, frame: Frame | None = None, special_tokens: Mapping[str, int] = NO_TOKENS
) -> tuple[str | None, dict[str, str]]:
    """Return (the function that the text is a call of, '' for one that it names itself, or None;
    the inputs of the text model that constrain the text to a grammar, if any).

    Reasoning is free, and what is around the content is as the model writes it.
    """
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    grammars = _GuideWriter(frame, special_tokens)
    if choice is not None and choice.function is not None:
        index = max(i for i, f in enumerate(functions) if f.name == choice.function.name)
        return functions[index].name, grammars.named_call(functions, index)
    if choice is not None and choice.type == "required":
        return "", grammars.call(functions)
    if body.response_format is None or body.response_format.type == "text":
        return None, {}
    schema = body.response_format.json_schema
    if schema is None:
        return None, grammars.schema({"type": "object"})
    return None, grammars.schema(close_objects(schema.schema_) if schema.strict else schema.schema_)


def _arguments(functions: list[Function], index: int) -> str:
    """Return the rule of a function's arguments. Raises ApiError."""
    function = functions[index]
    parameters = function.parameters or {}
    if not parameters or (parameters.keys() <= _ANNOTATIONS and parameters.get("properties") == {}):
        return json.dumps(NO_ARGUMENTS)
    schema = close_objects(parameters) if function.strict else parameters
    return f"%json {_schema_text(schema, f'tools[{index}].function.parameters')}"


def _schema_text(schema: Any, field: str) -> str:
    """Return a schema as the parser reads it. Raises ApiError."""
    try:
        return json.dumps(prepare_schema(schema))
    except ValueError as error:
        raise ApiError(400, f"{field} is not a supported schema: {error}", field) from None


class _GuideWriter:
    """Writes the guides of answers with one frame, in Lark where there is one.

    Each schema stands alone, as a document of its own: references in it, ``#`` and names of
    ``$defs`` mean what they mean there. Line n has the schema of function n, by which
    ``backend.openai_frontend.errors`` names the one that is wrong.
    """

    def __init__(self, frame: Frame | None, special_tokens: Mapping[str, int]) -> None:
        self._frame = frame
        self._special_tokens = special_tokens

    def schema(self, schema: dict[str, Any] | bool) -> dict[str, str]:
        """Return the guide of content by a schema."""
        text = _schema_text(schema, "response_format")
        if self._frame is None:
            return _guide("json_schema", text)
        header = self._header("final") if isinstance(self._frame, Channels) else ""
        return self._after_reasoning([f"content: %json {text}", f"answer: {header} content"])

    def named_call(self, functions: list[Function], index: int) -> dict[str, str]:
        """Return the guide of a call of one function: its arguments, or in a channel all of it."""
        if isinstance(self._frame, Channels):
            return self.call(functions, index)
        return self._after_reasoning([*[""] * index, f"answer: {_arguments(functions, index)}"])

    def call(self, functions: list[Function], only: int | None = None) -> dict[str, str]:
        """Return the guide of a call of one of the functions, or ``only`` of this one."""
        allowed = [*range(len(functions))] if only is None else [only]
        rules = [""] * len(functions)
        for index in allowed:
            rules[index] = f"arguments_{index}: {_arguments(functions, index)}"
        calls = (
            f"{self._call(functions[index].name)} arguments_{index} {self._call_end}"
            for index in allowed
        )
        return self._after_reasoning([*rules, "answer: " + " | ".join(calls)])

    def _call(self, name: str) -> str:
        """Return what is before a call's arguments."""
        if isinstance(self._frame, Channels):
            return self._header(f"commentary to=functions.{name} ", CONSTRAIN, "json")
        parts = ["{", '"name"', ":", json.dumps(name), ",", '"parameters"', ":"]
        return " BLANKS? ".join(json.dumps(part) for part in parts) + " BLANKS?"

    @property
    def _call_end(self) -> str:
        return "" if isinstance(self._frame, Channels) else 'BLANKS? "}"'

    def _after_reasoning(self, rules: list[str]) -> dict[str, str]:
        """Return a grammar of the rules, one a line, with its start: ``answer`` after reasoning."""
        if self._frame is None:
            rules = [*rules, "start: answer"]
        elif isinstance(self._frame, Channels):
            header, start = self._header("analysis"), self._mark(START)
            rules = [
                *rules,
                *self._up_to(END),
                f'reasoning: {header} anything {start} "assistant"',
                "start: reasoning* answer",
            ]
        else:
            opening = self._mark(self._frame.form.opening)
            begins = "anything GAP?" if self._frame.is_open else None
            begins = begins or f"(GAP? {opening} anything GAP?)?"
            rules = [*rules, *self._up_to(self._frame.form.closing), f"start: {begins} answer"]
        return _guide("ebnf_grammar", "\n".join([*rules, *_TERMINALS]))

    def _header(self, *parts: str) -> str:
        return " ".join(map(self._mark, (CHANNEL, *parts, MESSAGE)))

    def _mark(self, name: str) -> str:
        """Return a special token, or a text where it is none."""
        token = self._special_tokens.get(name)
        return json.dumps(name) if token is None else f"<[{token}]>"

    def _up_to(self, name: str) -> list[str]:
        """Return the rules of ``anything`` up to a mark."""
        if name in self._special_tokens:
            return [f"anything: ANY? {self._mark(name)}", "ANY: /(?s:.+)/"]
        return [f"anything[suffix={json.dumps(name)}]: /(?s:.*)/"]


def _guide(kind: str, text: str) -> dict[str, str]:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
