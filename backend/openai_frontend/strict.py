"""``strict`` schemas: objects have no properties but those that their schema names.

xgrammar, the default of TensorRT-LLM and vLLM, reads every schema so: an object schema that gives
neither ``additionalProperties`` nor ``unevaluatedProperties`` allows no others.
"""

from __future__ import annotations

from typing import Any

from backend.sampling.schemas import DATA, MAPS, of_kind, resolve

_PARTS = ("allOf", "anyOf", "oneOf")
_DECLARED_OPEN = ("additionalProperties", "unevaluatedProperties")

_Names = dict[tuple[str, str], None]
"""(keyword, name) of properties, in order."""


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
    if isinstance(closed, dict) and closer.opened:
        closed["$defs"] = {**of_kind(dict, closed, "$defs"), **closer.opened}
    return closed


class _Closer:
    """``opened`` are the parts that were referred to, by their names in ``$defs``."""

    def __init__(self, root: Any) -> None:
        self.opened: dict[str, Any] = {}
        self._root = root
        self._open_names: dict[str, str] = {}
        self._known_names: dict[str, _Names | None] = {}

    def close(self, schema: Any) -> Any:
        """Return a schema with all its objects closed."""
        if not isinstance(schema, dict):
            return schema
        if _is_put_together(schema):
            return self._close_parts(schema)
        closed = self._close_inside(schema)
        parts = any(key in schema for key in (*_PARTS, "$ref", "const", "enum"))
        if _is_object(schema) and not parts and not any(key in schema for key in _DECLARED_OPEN):
            closed["additionalProperties"] = False
        return closed

    def _close_inside(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the objects inside it closed, and itself as it is."""
        return {key: self._close_value(key, value) for key, value in schema.items()}

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
            self.opened[name] = self._open(target)
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
