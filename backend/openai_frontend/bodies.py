"""Reads a request's body: JSON of one of the kinds in ``schema``. A field that is unknown or not
served is refused by name; null is no field.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from backend.openai_frontend.errors import ApiError, invalid_body, path_of, wrong
from backend.openai_frontend.texts import as_json

INT32 = 2**31 - 1
IGNORED, REFUSED = "ignored", "refused"
CACHE_CONTROL = "Anthropic's: prompts that begin alike share KV without it"
MOST_LEVELS = 500
"""Arrays and objects inside each other; Python's own limit is about 900."""
_GZIP = b"\x1f\x8b"
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")
AnyBody = TypeVar("AnyBody", bound=BaseModel)


def ignored(does: str) -> Any:
    """Return a field that is accepted, whatever its value."""
    return Field(None, description=does, json_schema_extra={"fate": IGNORED}, exclude=True)


def refused(why: str, *neutral: Any) -> Any:
    """Return a field that is refused, unless its value asks for nothing."""
    extra: dict[str, Any] = {"fate": REFUSED, "neutral": list(neutral)}
    return Field(None, description=why, json_schema_extra=extra)


class Body(BaseModel):
    """A JSON object of named fields."""

    model_config = ConfigDict(extra="ignore")  # what is unknown is refused below, with a hint

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        """Refuse what is unknown or not served; leave out what is null."""
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1, 0.75)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise wrong(f"Unknown parameter: '{name}'.{hint}", name, "unknown_parameter")
            extra = fields[name].json_schema_extra
            if isinstance(extra, dict) and extra["fate"] == REFUSED and value is not None:
                neutral = extra["neutral"]
                if not isinstance(neutral, list) or value not in neutral:
                    message = (
                        f"Unsupported parameter: '{name}' is not served: {fields[name].description}"
                    )
                    raise wrong(message, name, "unsupported_parameter")
        return {name: value for name, value in given.items() if value is not None}


def one_of(value: Any, kind: type, name: str) -> Any:
    """Return a value that may also be a string. Raises where it is neither."""
    if not isinstance(value, kind):
        raise wrong(f"expected a string or {name}, but got {as_json(value)}", code="invalid_type")
    return value


def parse(data: bytes, headers: Mapping[str, str], kind: type[AnyBody]) -> AnyBody:
    """Return the body of a request with these headers. Raises ApiError."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = re.fullmatch(r"application/([\w.-]+\+)?json", media_type) is not None
    given = _decode(data, headers.get("content-encoding", "")) if data and is_json else None
    if not isinstance(given, dict):
        raise ApiError(400, "The body must be a JSON object, with Content-Type: application/json")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None
    if _MAY_BE_SURROGATE.search(data):
        _refuse_surrogates({name: given[name] for name in given if not _is_ignored(kind, name)})
    return body


def _decode(data: bytes, encoding: str) -> Any:
    """Return the JSON value that a body is. Raises ApiError."""
    if encoding.lower() not in ("", "identity") or data.startswith(_GZIP):
        name = encoding or "gzip"
        raise ApiError(400, f"The body is compressed ({name}), which is not served: send it plain")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise ApiError(400, f"The body is not JSON: it is not UTF-8, {byte}") from None
    except RecursionError:
        raise _nesting_error() from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise ApiError(400, f"The body has an integer of more than {most} digits") from None
    if data.count(b"[") + data.count(b"{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
        raise _nesting_error()
    return value


def _nesting_error() -> ApiError:
    return ApiError(400, f"The body is nested too deeply: more than {MOST_LEVELS} levels")


def _levels(value: Any) -> int:
    """Return how deeply arrays and objects are nested in a value."""
    level, count = [value], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        level = [c for node in level for c in (node.values() if isinstance(node, dict) else node)]
        count += 1
    return count


def _is_ignored(kind: type[BaseModel], name: str) -> bool:
    field = kind.model_fields.get(name)
    extra = field.json_schema_extra if field is not None else None
    return isinstance(extra, dict) and extra.get("fate") == IGNORED


def _refuse_surrogates(value: Any) -> None:
    """Raise ApiError for half a surrogate pair, which is no text: an emoji that was cut in two."""
    for path, text in _texts(value, ()):
        if found := _SURROGATE.search(text):
            param = path_of(path)
            message = f"'{param}' has a lone surrogate, {found[0]}, at character {found.start()}"
            raise ApiError(400, message, param, "invalid_value")


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the texts of a value, keys among them, and where they are."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name), name
            yield from _texts(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
