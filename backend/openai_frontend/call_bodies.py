"""The notations in which models write a call of a function: JSON, tags, Python and others."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from backend.openai_frontend.parts import Call

Functions = Mapping[str, Any]
"""The schemas of functions' parameters, by the functions' names."""


class Notation(Protocol):
    """How calls are written between the marks of a format."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls of known functions that a text is; None for any other text."""
        ...


@dataclass(frozen=True, slots=True)
class JsonNotation:
    """One object with ``name`` and ``arguments`` (or ``parameters``), several, or a list."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        values, text = list[Any](), text.strip()
        try:
            while text:
                value, end = json.JSONDecoder().raw_decode(text)
                values += value if isinstance(value, list) else [value]
                text = text[end:].lstrip(" \t\r\n;,")
            return [_json_call(value, functions) for value in values] or None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class TagNotation:
    """A name, and then every argument in tags of its own, strings without quotes."""

    name: re.Pattern[str]
    argument: re.Pattern[str]
    """Its groups are an argument's name and value."""
    end: str = ""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the one call that a text is, None for any other text."""
        found = self.name.match(text)
        if found is None or found[1] not in functions:
            return None
        properties = _properties(functions[found[1]])
        at, arguments = found.end(), dict[str, Any]()
        while (pair := self.argument.match(text, at)) is not None:
            arguments[pair[1]] = typed(pair[2], properties.get(pair[1]))
            at = pair.end()
        if text[at:].strip() != self.end:
            return None
        return [Call(found[1], _dumped(arguments))]


@dataclass(frozen=True, slots=True)
class PythonNotation:
    """Calls in Python, alone or in a list, whose arguments are literals; or else JSON."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in strings
                body = ast.parse(text.strip()).body
            calls = list[Call]()
            for statement in body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                several = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
                calls += [_python_call(node, functions) for node in several]
            if calls:
                return calls
        except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            pass
        return JSON.calls(text, functions)


@dataclass(frozen=True, slots=True)
class NamedNotation:
    """A name and then the arguments in JSON, as often as there are calls."""

    name: re.Pattern[str]
    """Text before the arguments; the group that matches is a function's name."""
    end: re.Pattern[str]
    """Text after them."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        at, calls = 0, list[Call]()
        try:
            while at < len(text):
                named = self.name.match(text, at)
                if named is None:
                    return None
                arguments, at = json.JSONDecoder().raw_decode(text, named.end())
                name = next(group for group in named.groups() if group)
                calls.append(_json_call({"name": name, "arguments": arguments}, functions))
                if (ended := self.end.match(text, at)) is None:
                    return None
                at = ended.end()
        except (ValueError, RecursionError):
            return None
        return calls or None


_ESCAPE = "<escape>"
_GEMMA_CALL = re.compile(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")


@dataclass(frozen=True, slots=True)
class FunctionGemmaNotation:
    """``call:name{key:value}``, with bare keys and strings between ``<escape>``."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the one call that a text is, None for any other text."""
        if (found := _GEMMA_CALL.fullmatch(text)) is None:
            return None
        parts = found[2].split(_ESCAPE)  # every second one is a string
        parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        call = arguments_call(found[1], "".join(parts), functions)
        return None if call is None else [call]


def arguments_call(name: str, text: str, functions: Functions) -> Call | None:
    """Return the call of a function with arguments in JSON, None where it is none."""
    try:
        return _json_call({"name": name, "arguments": json.loads(text)}, functions)
    except (ValueError, RecursionError):
        return None


def _json_call(value: dict[str, Any], functions: Functions) -> Call:
    """Return the call of a JSON value. Raises an error for any other value."""
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if value["name"] not in functions or not isinstance(arguments, dict):
        raise ValueError("no call")
    return Call(str(value["name"]), _dumped(arguments))


def _python_call(node: ast.expr | None, functions: Functions) -> Call:
    """Return the call of a Python expression. Raises an error for any other expression."""
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = ast.unparse(node.func)
    names = list(_properties(functions[name]))
    if len(node.args) > len(names):
        raise ValueError("more arguments than parameters")
    arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("no argument of its own")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return Call(name, _dumped(arguments))


def _dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_KINDS = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def typed(text: str, schema: Any) -> Any:
    """Return the value that a text without quotes stands for, by the schema of its argument: a
    text wherever a text is allowed and nothing else fits.
    """
    allowed = _allowed_kinds(schema)
    try:
        text_of_json = _PYTHON_NAMES.get(text.strip(), text)
        value = json.loads(text_of_json, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    kinds = _kinds_of(value)
    fits = not allowed or ("string" not in kinds and not allowed.isdisjoint(kinds))
    return value if fits or "string" not in allowed else text


def _allowed_kinds(schema: Any) -> set[str]:
    """Return JSON Schema's types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(map(str, _items(kind)))
    for name in ("anyOf", "oneOf"):
        parts = [_allowed_kinds(part) for part in _items(schema.get(name))]
        if parts:
            return set.union(*parts) if all(parts) else set()
    return {kind for value in _items(schema.get("enum")) for kind in _kinds_of(value)}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kinds_of(value: Any) -> tuple[str, ...]:
    return next(kinds for kind, kinds in _KINDS if isinstance(value, kind))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


JSON = JsonNotation()
