"""Parts of a chat's text."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; ``arguments`` are JSON."""

    name: str
    arguments: str


@dataclass(slots=True)
class Parts:
    """Content of a piece of a text."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.reasoning or self.content or self.calls)
