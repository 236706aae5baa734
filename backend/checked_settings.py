"""Settings as dataclasses built from JSON: an unknown key, a wrong type or a value out of range is
an error that names the key and the value.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import field
from typing import Any

LEAST_LIKENESS = 0.75
"""``difflib`` ratio from which on a key counts as a misspelling of another."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key and the value."""


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
) -> Any:
    """Declare a setting and what it may be."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


_REMOVED = {
    "cohorts": "was removed (one batch is faster: docs/what-did-not-pay.md)",
    "attention": "was removed (every engine reads each context at its own length)",
}
"""The fate of earlier settings."""


def build_settings(cls: type[Any], raw: Any, path: str) -> Any:
    """Build a config dataclass from a JSON object, checking every key, type and range."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{path or 'the file'} must be an object, got {raw!r}")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for key in raw:
        if key in _REMOVED and key not in fields:
            raise ConfigError(f"{_join(path, key)!r} {_REMOVED[key]}: remove it from the file")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, LEAST_LIKENESS)
            hint = f": did you mean {near[0]!r}?" if near else f"; known here: {', '.join(fields)}"
            raise ConfigError(f"unknown key {_join(path, key)!r}{hint}")
    return cls(
        **{
            key: _value(hints[key], value, _join(path, key), fields[key].metadata)
            for key, value in raw.items()
        }
    )


def _value(hint: Any, value: Any, path: str, metadata: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return build_settings(typing.cast(type[Any], hint), value, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        return tuple(
            _value(typing.get_args(hint)[0], item, f"{path}[{i}]", {})
            for i, item in enumerate(value)
        )
    if typing.get_origin(hint) is dict:  # an object of the user's own
        hint = dict
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in allowed and type(value) is int:
        value = float(value)
    if type(value) not in allowed:
        raise ConfigError(
            f"{path} must be {' or '.join(kind.__name__ for kind in allowed)}, got {value!r}"
        )
    _check_range(value, path, metadata)
    return value


def _check_range(value: Any, path: str, metadata: Any) -> None:
    low, high, choices = metadata.get("low"), metadata.get("high"), metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{path} must be one of {list(choices)}, got {value!r}")
    if low is not None and not value >= low:
        raise ConfigError(f"{path} must be at least {low}, got {value!r}")
    if high is not None and not value <= high:
        raise ConfigError(f"{path} must be at most {high}, got {value!r}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
