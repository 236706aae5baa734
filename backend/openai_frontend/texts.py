"""A chat's text as it comes in pieces, what is read out of it, and values as errors show them.

Nothing here imports FastAPI, which the Dynamo worker's environment lacks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_MOST_SHOWN = 60


def as_json(value: Any) -> str:
    """Return a value as an error shows it: JSON, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


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


class Marks:
    """Marks that a text is searched for."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._heads = {mark[0] for mark in marks}
        self._longest = max(map(len, marks), default=1)
        longest_first = sorted(marks, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def unsure(self, text: str, start: int) -> int:
        """Return where the end of a text begins that may become a mark, or a longer one, from
        ``start`` on.
        """
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._heads and any(
                mark.startswith(text[at:]) and len(mark) > len(text) - at for mark in self._marks
            ):
                return at
        return len(text)


@lru_cache(64)
def marks(*names: str) -> Marks:
    """Return marks, compiled once."""
    return Marks(names)


class Scanner:
    """A text that comes in pieces and is taken up to marks."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0

    def feed(self, text: str) -> None:
        """Add a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, wanted: Marks, *, ended: bool) -> tuple[str, str]:
        """Return the text before the first mark and the mark. Without one it is '', and the text
        lacks an end that may become a mark, unless the text has ``ended``.
        """
        found = wanted.pattern.search(self._text, self._at)
        start = self._at if found is None else found.start()
        end = len(self._text) if ended else wanted.unsure(self._text, start)
        if found is None or end == start:
            return self.skip(end - self._at), ""
        before, self._at = self._text[self._at : start], found.end()
        return before, found[0]

    def peek(self, size: int) -> str:
        """Return the next letters, at most ``size``, and leave them there."""
        return self._text[self._at : self._at + size]

    def skip(self, size: int) -> str:
        """Return the next letters, at most ``size``. A negative ``size`` goes back over a mark that
        was taken.
        """
        text = self.peek(size)
        self._at = min(self._at + size, len(self._text))
        return text

    def rest(self) -> str:
        """Return all that is left."""
        return self.skip(len(self._text) - self._at)


class Blanks:
    """Holds back the blanks at the end of a text that comes in pieces, until more follows."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def add(self, text: str) -> str:
        """Return what is certain with this piece: the text without blanks at its end."""
        if not (solid := text.rstrip()):
            self._waiting.append(text)
            return ""
        before, self._waiting = "".join(self._waiting), [text[len(solid) :]]
        return before + solid

    def take(self) -> str:
        """Return the blanks, and hold them no longer."""
        blanks, self._waiting = "".join(self._waiting), []
        return blanks
