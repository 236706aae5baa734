"""The notations in which models write a call of a function: JSON, tags, Python and others."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

_MOST_SHOWN = 60
"""Characters of a value that an error shows."""
Functions = Mapping[str, Any]
"""The schemas of functions' parameters, by the functions' names."""
_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of a text that is no call."""
_BLANKS, _NAME = re.compile(r"\s*"), re.compile(r"[^\s\[{]*")
_DECODER = json.JSONDecoder()
_NAMESPACES = ("functions.", "default_api.")
"""Names that models write before those of functions."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; ``arguments`` are JSON."""

    name: str
    arguments: str


def arguments_of(value: Any) -> Any:
    """Return a call's arguments as a value: JSON is parsed, and nothing, blanks or null are no
    arguments. Raises ValueError for a text that is no JSON, RecursionError for one nested too
    deeply.
    """
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
    return {} if value is None else value


class Notation(Protocol):
    """How calls are written between the marks of a format."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls of known functions that a text is; None for any other text."""
        ...


class Cursor:
    """A text that is read from its beginning; blanks between what is read do not count."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._move(0)

    @property
    def is_at_end(self) -> bool:
        """Whether all of the text has been read."""
        return self._at == len(self._text)

    def skip(self, *literals: str) -> str:
        """Return the first of the literals that is next, and move past it; '' where none is."""
        literal = next((each for each in literals if self._text.startswith(each, self._at)), "")
        self._move(self._at + len(literal))
        return literal

    def until(self, literal: str) -> str:
        """Return the text before a literal, and move past both. Raises ValueError without one."""
        end = self._text.index(literal, self._at)
        text = self._text[self._at : end]
        self._move(end + len(literal))
        return text.strip()

    def word(self) -> str:
        """Return the letters that can be a function's name, and move past them."""
        match = _NAME.match(self._text, self._at)
        name = match[0] if match else ""
        self._move(self._at + len(name))
        return name

    def value(self) -> Any:
        """Return the JSON value that is next, and move past it. Raises ValueError without one."""
        value, end = _DECODER.raw_decode(self._text, self._at)
        self._move(end)
        return value

    def rest(self) -> str:
        """Return what has not been read."""
        return self._text[self._at :]

    def _move(self, at: int) -> None:
        blanks = _BLANKS.match(self._text, at)
        self._at = blanks.end() if blanks else at


@dataclass(frozen=True, slots=True)
class JsonNotation:
    """One object with ``name`` and ``arguments`` (or ``parameters``), several, or a list."""

    fence: str = ""
    """Text that may follow them."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        cursor, values = Cursor(text), list[Any]()
        try:
            while not cursor.is_at_end:
                value = cursor.value()
                values += value if isinstance(value, list) else [value]
                while cursor.skip(";", ",", self.fence):
                    pass
            return [_json_call(value, functions) for value in values] or None
        except _NO_CALL:
            return None


@dataclass(frozen=True, slots=True)
class TagNotation:
    """A name, and then every argument in tags of its own, strings without quotes, or else all of
    them in JSON. An argument without its closing tag ends where the next begins.
    """

    name_end: str
    key: str
    """Text before the name of an argument."""
    value: str
    """Text between its name and its value."""
    end: str
    """Text after its value."""
    key_end: str = ""
    """Text after its name; it may be missing."""
    has_lines: bool = False
    """A line end on either side of a value is no part of it."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the one call that a text is, None for any other text."""
        head, *parts = text.split(self.key)
        name, mark, rest = head.strip().partition(self.name_end)
        if (not mark and self.name_end != "\n") or (parts and rest.strip()):
            return JSON.calls(text, functions)
        try:
            name = _name_of(name.strip(), functions)
            arguments: Any = rest
            if parts:
                properties = _properties(functions[name])
                texts = self._arguments(parts, properties)
                arguments = {key: as_value(texts[key], properties.get(key)) for key in texts}
            return [_call(name, arguments, functions)]
        except _NO_CALL:
            return JSON.calls(text, functions)

    def _arguments(self, parts: list[str], properties: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts of arguments by name. A key's tag in a value is part of it where no
        argument of that name is due.
        """
        pieces, is_open = dict[str, list[str]](), False
        key = ""
        for part in parts:
            head, value_tag, value = part.partition(self.value)
            name = head.strip().removesuffix(self.key_end).strip()
            is_due = name not in pieces and (name in properties or not properties)
            if is_open and not (value_tag and is_due):
                pieces[key].append(self.key + part)
            else:
                if not value_tag or not name or "\n" in name:
                    raise ValueError("no argument")
                key, pieces[name] = name, [value]
            is_open = self.end not in part
        return {key: self._value("".join(pieces[key])) for key in pieces}

    def _value(self, text: str) -> str:
        value, end, rest = text.partition(self.end)
        if rest.strip():
            raise ValueError("text after an argument")
        if self.has_lines:
            value = value.removeprefix("\n")
        return value.removesuffix("\n") if self.has_lines or not end else value


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
        except (SyntaxError, MemoryError, *_NO_CALL):
            pass
        return JSON.calls(text, functions)


@dataclass(frozen=True, slots=True)
class DeepSeekNotation:
    """Calls between marks: a name and the arguments in JSON, in a block of code or not."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        cursor, calls = Cursor(text), list[Call]()
        try:
            while not cursor.is_at_end:
                cursor.skip("<｜tool▁call▁begin｜>")
                name = cursor.until("<｜tool▁sep｜>")
                if name == "function":
                    name = cursor.word()
                cursor.skip("```json", "```")
                calls.append(_call(name, cursor.value(), functions))
                cursor.skip("```")
                if not cursor.skip("<｜tool▁call▁end｜>") and not cursor.is_at_end:
                    return None
        except _NO_CALL:
            return None
        return calls or None


@dataclass(frozen=True, slots=True)
class MistralNotation:
    """Names before arguments in JSON, as often as there are calls, or else JSON alone."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the calls that a text is, None for any other text."""
        cursor, calls = Cursor(text), list[Call]()
        try:
            while not cursor.is_at_end:
                cursor.skip("[TOOL_CALLS]")
                if name := cursor.word():
                    if cursor.skip("[CALL_ID]"):
                        cursor.word()
                    cursor.skip("[ARGS]")
                    calls.append(_call(name, cursor.value(), functions))
                else:
                    value = cursor.value()
                    several = value if isinstance(value, list) else [value]
                    calls += [_json_call(each, functions) for each in several]
        except _NO_CALL:
            return None
        return calls or None


_ESCAPE = "<escape>"
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*"?|([{,]\s*)([A-Za-z_]\w*)\s*:', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FunctionGemmaNotation:
    """``call:name{key:value}``, with bare keys and strings between ``<escape>``."""

    def calls(self, text: str, functions: Functions) -> list[Call] | None:
        """Return the one call that a text is, None for any other text."""
        mark, _, call = text.partition("call:")
        name, brace, rest = call.partition("{")
        if mark.strip() or not brace:
            return None
        parts = f"{{{rest}".split(_ESCAPE)  # every second one is a string
        parts[::2] = [_STRING_OR_KEY.sub(_quoted_key, part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        new_call = arguments_call(name.strip(), "".join(parts), functions)
        return None if new_call is None else [new_call]


def _quoted_key(match: re.Match[str]) -> str:
    return f'{match[1]}"{match[2]}":' if match[2] else match[0]


def arguments_call(name: str, text: str, functions: Functions) -> Call | None:
    """Return the call of a function with arguments in JSON, None where it is none."""
    try:
        return _call(name, text, functions)
    except _NO_CALL:
        return None


def _json_call(value: dict[str, Any], functions: Functions) -> Call:
    """Return the call of a JSON value, OpenAI's own form too. Raises an error for any other."""
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name", function)
    return _call(name, value.get("arguments", value.get("parameters")), functions)


def _call(name: Any, arguments: Any, functions: Functions) -> Call:
    """Return the call of a function. Raises an error where it is none."""
    parsed = arguments_of(arguments)
    if not isinstance(parsed, dict):
        raise ValueError("arguments are an object")
    return Call(_name_of(name, functions), dump(parsed))


def _name_of(name: str, functions: Functions) -> str:
    """Return the name of a function. Raises KeyError for an unknown one."""
    for prefix in ("", *_NAMESPACES):
        if (bare := name.removeprefix(prefix)) in functions:
            return bare
    raise KeyError(name)


def _python_call(node: ast.expr | None, functions: Functions) -> Call:
    """Return the call of a Python expression. Raises an error for any other expression."""
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = _name_of(ast.unparse(node.func), functions)
    names = list(_properties(functions[name]))
    if len(node.args) > len(names):
        raise ValueError("more arguments than parameters")
    arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("no argument of its own")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return _call(name, arguments, functions)


def dump(arguments: Any) -> str:
    """Return arguments as JSON that is text, also with half a surrogate pair. Raises ValueError for
    what is none.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return text


def as_json(value: Any) -> str:
    """Return a value as an error shows it: JSON, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


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


def as_value(text: str, schema: Any) -> Any:
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
