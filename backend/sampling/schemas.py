"""JSON schemas as the parser of grammars reads them: bounded in white space, and with ``oneOf``
that it may take for ``anyOf``.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any
from urllib.parse import unquote

BLANKS = r"[ \t]|\r?\n[ \t]{0,8}"
"""White space between two tokens of JSON, as a regular expression: where any is allowed, models
write it until their text is full.
"""
MOST_COMPARISONS = 5_000
"""Comparisons of alternatives in one schema."""
MOST_DEPTH = 6
"""Depth of a comparison in properties and alternatives."""

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
DATA = ("const", "enum", "default", "example", "examples", "required")
"""Keywords whose values are no schemas."""
_LONGEST = {"date-time": 35, "time": 24}
"""Characters of a time in nanoseconds with its zone: the format sets no end to the digits."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_BOUNDS = {
    "number": {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1},
    "string": {"minLength": 0, "maxLength": 0},
    "array": {"minItems": 0, "maxItems": 0},
}
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
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
    """Separates the alternatives of every ``oneOf`` of one document.

    A list of schemas stands for a value that follows all of them.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._comparisons = 0

    def prepare(self, schema: Any, place: str) -> Any:
        """Return a schema in which alternatives exclude each other. Raises ValueError."""
        if not isinstance(schema, dict):
            return schema
        made = {key: self._inside(key, value, place) for key, value in schema.items()}
        if isinstance(schema.get("oneOf"), list):
            self._separate(schema, made["oneOf"], place)
        if isinstance(form := schema.get("format"), str) and form in _LONGEST:
            made.setdefault("maxLength", _LONGEST[form])
        return made

    def _inside(self, key: str, value: Any, place: str) -> Any:
        place = f"{place}/{key}"
        if key in DATA:
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self.prepare(one, f"{place}/{name}") for name, one in value.items()}
        if isinstance(value, list):
            return [self.prepare(one, f"{place}/{at}") for at, one in enumerate(value)]
        return self.prepare(value, place)

    def _separate(self, schema: dict[str, Any], options: list[Any], place: str) -> None:
        """Forbid in alternatives that may both hold a property that the other one needs."""
        if self._have_tags(options):
            return
        around = {key: value for key, value in schema.items() if key != "oneOf"}
        whole = [[around, option] for option in options]
        for one, two in combinations(range(len(options)), 2):
            if self._exclusive(whole[one], whole[two]):
                continue
            for this, other in ((one, two), (two, one)):
                own, others = (_required(self._parts(whole[at])) for at in (this, other))
                name = next((name for name in others if name not in own), None)
                without: dict[str, Any] = {"properties": {name: False}}
                if name is None or not self._exclusive([*whole[this], without], whole[other]):
                    raise ValueError(
                        f"oneOf at {place}: alternatives {one + 1} and {two + 1} may both hold for "
                        "one value; write anyOf, or tell them apart, as by a required property "
                        "with another const in each"
                    )
                options[this] = {"allOf": [options[this], without]}

    def _have_tags(self, options: list[Any]) -> bool:
        """Return whether alternatives are different values, or objects that have different values
        of one property: as many as there are, without comparing each with each.
        """
        parts = [self._parts([option]) for option in options]
        if not all(part and False not in part for part in parts):
            return False
        if _are_different([_values(part) for part in parts]):
            return True
        objects = all(_types(part, _values(part)) == {"object"} for part in parts)
        names = set.intersection(*({*_required(part)} for part in parts)) if objects else ()
        return any(
            _are_different([_values(self._parts(_of_property(part, name))) for part in parts])
            for name in names
        )

    def _exclusive(self, these: list[Any], those: list[Any], depth: int = 0) -> bool:
        """Return whether it is certain that no value follows these and those."""
        self._comparisons += 1
        if self._comparisons > MOST_COMPARISONS:
            raise ValueError(f"its oneOf take over {MOST_COMPARISONS} comparisons of alternatives")
        if depth > MOST_DEPTH:
            return False
        these, those = self._parts(these), self._parts(those)
        if any(part is False for part in (*these, *those)) or self._differ(these, those, depth):
            return True
        for mine, others in ((these, those), (those, these)):
            for at, part in enumerate(mine):
                for key in ("anyOf", "oneOf"):
                    if options := of_kind(list, part, key):
                        rest = {name: value for name, value in part.items() if name != key}
                        alone = [*mine[:at], rest, *mine[at + 1 :]]
                        return all(
                            self._exclusive([*alone, one], others, depth + 1) for one in options
                        )
        return False

    def _parts(self, schemas: list[Any]) -> list[Any]:
        """Return the schemas with what they refer to and all that they are put together from."""
        parts, waiting = list[Any](), list(schemas)
        while waiting and len(parts) < _MOST_PARTS:
            part = waiting.pop()
            if isinstance(part, dict):
                waiting += of_kind(list, part, "allOf")
                waiting.append(resolve(self._root, part.get("$ref")))
            if part is False or isinstance(part, dict):
                parts.append(part)
        return parts

    def _differ(self, these: list[Any], those: list[Any], depth: int) -> bool:
        """Return whether values differ by type, or within every type that both have."""
        mine, others = _values(these), _values(those)
        if mine is not None and others is not None and mine.isdisjoint(others):
            return True
        return all(
            (kind == "object" and self._objects_differ(these, those, depth))
            or _range(these, kind)[1] < _range(those, kind)[0]
            or _range(those, kind)[1] < _range(these, kind)[0]
            for kind in _types(these, mine) & _types(those, others)
        )

    def _objects_differ(self, these: list[Any], those: list[Any], depth: int) -> bool:
        return any(
            self._exclusive(_of_property(these, name), _of_property(those, name), depth + 1)
            for name in {**_required(these), **_required(those)}
        )


def _are_different(values: list[frozenset[Any] | None]) -> bool:
    known = [value for value in values if value is not None]
    return len(known) == len(values) and len(set().union(*known)) == sum(map(len, known))


def _values(parts: list[Any]) -> frozenset[Any] | None:
    """Return the values that are listed; None: any."""
    for part in (part for part in parts if part is not False):
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


def _required(parts: list[Any]) -> dict[str, None]:
    """Return the names of properties that a value must have, in order."""
    names = (
        name for part in parts if part is not False for name in of_kind(list, part, "required")
    )
    return {name: None for name in names if isinstance(name, str)}


def _types(parts: list[Any], values: frozenset[Any] | None) -> frozenset[str]:
    types = _TYPES
    for part in parts:
        given = part.get("type")
        names = given if isinstance(given, list) else [given]
        if all(isinstance(name, str) for name in names):
            types &= {"number" if name == "integer" else name for name in names}
    return types if values is None else types & {kind for kind, _ in values}


def _range(parts: list[Any], kind: str) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the bounds of a number, length or count; -1 and 1: it ends before and begins after."""
    low, high = (-math.inf, 0), (math.inf, 0)
    for part in parts:
        for key, side in _BOUNDS.get(kind, {}).items():
            bound = part.get(key)
            if isinstance(bound, (int, float)) and not isinstance(bound, bool):
                if key in _LEAST:
                    low = max(low, (bound, side))
                else:
                    high = min(high, (bound, side))
    return low, high


def _of_property(parts: list[Any], name: str) -> list[Any]:
    """Return the schemas that a property must follow."""
    schemas = []
    for part in parts:
        named = of_kind(dict, part, "properties")
        if name in named:
            schemas.append(named[name])
        elif "patternProperties" not in part:
            schemas.append(part.get("additionalProperties", True))
    return schemas
