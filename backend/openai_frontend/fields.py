"""Fields of bodies: what is unknown or not served is refused by name, null is no field."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backend.openai_frontend.errors import wrong
from backend.openai_frontend.literals import as_json

INT32 = 2**31 - 1
IGNORED, REFUSED = "ignored", "refused"
CACHE_CONTROL = "Anthropic's: prompts that begin alike share KV without it"


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
