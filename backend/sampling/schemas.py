"""JSON schemas as the parser of grammars reads them: bounded in white space, and with ``oneOf``
that it may take for ``anyOf``.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any
from urllib.parse import unquote

BLANKS = r"[ \t]|\r?\n[ \t]{0,8}"
"""White space between two tokens of JSON, as a regular expression: where any is allowed, models
write it until their text is full.
"""
MOST_COMPARISONS = 100_000
"""Comparisons of alternatives in one schema."""

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
DATA = ("const", "enum", "default", "example", "examples", "required")
"""Keywords whose values are no schemas."""
_LONGEST = {"date-time": 35, "time": 24}
"""Characters of a time in nanoseconds with its zone: the format sets no end to the digits."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MOST_PARTS = 100


def prepare_schema(schema: Any) -> Any:
    """Return a schema for the parser; every value of the result is one of the original.

    Raises ValueError where alternatives of a ``oneOf`` may both hold.
    """
    try:
        prepared = _Alternatives(schema).prepare(schema, "#")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if prepared is True:
        prepared = {}
    if isinstance(prepared, dict):
        prepared["x-guidance"] = {"whitespace_pattern": BLANKS, "coerce_one_of": True}
    return prepared


def resolve(root: Any, reference: Any) -> Any:
    """Return what a JSON pointer into a schema points to; None for any other reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name in map(str, range(len(place))):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place


def of_kind(kind: type[dict[str, Any]] | type[list[Any]], schema: dict[str, Any], key: str) -> Any:
    """Return the value of a keyword, empty where it is not of its kind: the parser refuses it."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()


class _Alternatives:
    """Checks the alternatives of every ``oneOf`` of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._comparisons = 0

    def prepare(self, schema: Any, place: str) -> Any:
        """Return a schema whose alternatives exclude each other. Raises ValueError."""
        if not isinstance(schema, dict):
            return schema
        prepared = {key: self._inside(key, value, place) for key, value in schema.items()}
        if options := of_kind(list, schema, "oneOf"):
            self._check(options, place)
        if isinstance(form := schema.get("format"), str) and form in _LONGEST:
            prepared.setdefault("maxLength", _LONGEST[form])
        return prepared

    def _inside(self, key: str, value: Any, place: str) -> Any:
        place = f"{place}/{key}"
        if key in DATA:
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self.prepare(one, f"{place}/{name}") for name, one in value.items()}
        if isinstance(value, list):
            return [self.prepare(one, f"{place}/{at}") for at, one in enumerate(value)]
        return self.prepare(value, place)

    def _check(self, options: list[Any], place: str) -> None:
        """Raise ValueError unless any two alternatives differ by type, by the values that they list
        or by those of a property that both require.
        """
        marks = [self._marks(option) for option in options]
        for (one, these), (two, those) in combinations(enumerate(marks, 1), 2):
            self._comparisons += 1
            if self._comparisons > MOST_COMPARISONS:
                text = f"its oneOf take over {MOST_COMPARISONS} comparisons of alternatives"
                raise ValueError(text)
            if not any(these[key].isdisjoint(those[key]) for key in these.keys() & those.keys()):
                raise ValueError(
                    f"oneOf at {place}: alternatives {one} and {two} may both hold for one value; "
                    "write anyOf, or tell them apart, as by a required property with another const "
                    "in each"
                )

    def _marks(self, option: Any) -> dict[str, frozenset[Any]]:
        """Return what tells an alternative apart: its types by "", its values by "=", and by name
        those of its required properties.
        """
        parts = self._parts(option)
        values = _values(parts)
        types = _types(parts, values)
        marks = {"": types} if values is None else {"": types, "=": values}
        if types == {"object"}:
            for name in _required_names(parts):
                named = [of_kind(dict, part, "properties").get(name) for part in parts]
                tags = _values([part for one in named for part in self._parts(one)])
                if tags is not None:
                    marks[f".{name}"] = tags
        return marks

    def _parts(self, schema: Any) -> list[dict[str, Any]]:
        """Return a schema with what it refers to and all that it is put together from."""
        parts, waiting = list[Any](), [schema]
        while waiting and len(parts) < _MOST_PARTS:
            part = waiting.pop()
            if isinstance(part, dict):
                waiting += of_kind(list, part, "allOf")
                waiting.append(resolve(self._root, part.get("$ref")))
                parts.append(part)
        return parts


def _values(parts: list[dict[str, Any]]) -> frozenset[Any] | None:
    """Return the values that are listed; None: any."""
    for part in parts:
        listed = [part["const"]] if "const" in part else of_kind(list, part, "enum")
        if listed:
            return frozenset(map(_canonical, listed))
    return None


def _canonical(value: Any) -> tuple[str, Any]:
    """Return the type of a value, and what equals that of an equal value."""
    if isinstance(value, dict):
        return "object", frozenset((name, _canonical(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_canonical, value))
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean", value
    return "string" if isinstance(value, str) else "number", value


def _required_names(parts: list[dict[str, Any]]) -> set[str]:
    """Return the names of properties that a value must have."""
    names = (name for part in parts for name in of_kind(list, part, "required"))
    return {name for name in names if isinstance(name, str)}


def _types(parts: list[dict[str, Any]], values: frozenset[Any] | None) -> frozenset[str]:
    types = _TYPES
    for part in parts:
        kinds = part.get("type")
        names = kinds if isinstance(kinds, list) else [kinds]
        if all(isinstance(name, str) for name in names):
            types &= {"number" if name == "integer" else name for name in names}
    return types if values is None else types & {kind for kind, _ in values}
