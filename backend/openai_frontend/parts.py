"""Parts of a chat's text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


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


@dataclass(slots=True)
class Parts:
    """Content of a piece of a text."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.reasoning or self.content or self.calls)
