"""Special tokens in messages as plain text: what a client writes forges no turn of the chat.

The template is rendered with cuts, which no client can guess, in every special token that a message
spells. The prompt is then tokenised as a whole, and the tokens of those are replaced by the tokens
of their letters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

_KEYS = frozenset(
    (
        *("role", "content", "name", "tool_call_id", "tool_calls", "id", "type", "function"),
        *("arguments", "reasoning_content", "reasoning", "thinking"),
    )
)
"""Names that templates look for; others are those of a call's arguments."""


@dataclass(frozen=True, slots=True)
class Escaped:
    """A prompt, and the special tokens in it as they follow each other: name, and whether it is
    plain text.
    """

    text: str
    tokens: tuple[tuple[str, bool], ...]

    @property
    def plain(self) -> set[str]:
        """The names that are plain text somewhere."""
        return {name for name, is_plain in self.tokens if is_plain}

    def ids(
        self, ids: list[int], special_tokens: Mapping[str, int], plain: Mapping[str, list[int]]
    ) -> list[int] | None:
        """Return the prompt's tokens, of those with all special tokens as such and those of the
        ``plain`` names' letters; None where the two do not match.
        """
        known = set(special_tokens.values())
        places = [place for place, token in enumerate(ids) if token in known]
        if not places:  # the tokenizer takes their names as text anyway
            return ids
        if [ids[place] for place in places] != [special_tokens[name] for name, _ in self.tokens]:
            return None
        made, end = list[int](), 0
        for place, (name, is_plain) in zip(places, self.tokens, strict=True):
            made += ids[end:place] + (plain[name] if is_plain else [ids[place]])
            end = place + 1
        return made + ids[end:]


class Escaper:
    """Marks special tokens in messages for one rendering of a template."""

    def __init__(self, names: Iterable[str]) -> None:
        self._shapes = _shapes(tuple(names))
        self._cut = secrets.token_hex(16)

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with their special tokens cut."""
        return [{**self._value(message), "role": message["role"]} for message in messages]

    def prompt(self, rendered: str) -> str | Escaped:
        """Return the prompt of a rendered template; an escaped one where there is need."""
        parts = rendered.split(self._cut)
        cuts, text = list(accumulate(map(len, parts[:-1]))), "".join(parts)
        tokens = [
            (found[0], any(found.start() < cut < found.end() for cut in cuts))
            for found in (self._shapes.pattern.finditer(text) if cuts else ())
        ]
        return Escaped(text, tuple(tokens)) if any(plain for _, plain in tokens) else text

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._key(name): self._value(item) for name, item in value.items()}
        return [self._value(item) for item in value] if isinstance(value, list) else value

    def _key(self, name: str) -> str:
        return name if name in _KEYS else self._text(name)

    def _text(self, text: str) -> str:
        """Return a text with cuts in special tokens, and at an end that may be a part of one."""
        shapes, cut = self._shapes, self._cut
        is_tail = any(text[:size] in shapes.tails for size in range(1, shapes.longest))
        is_head = any(text[-size:] in shapes.heads for size in range(1, shapes.longest))
        text = shapes.pattern.sub(lambda found: found[0][:1] + cut + found[0][1:], text)
        return cut * is_tail + text + cut * is_head


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The forms of special tokens that are looked for: them, their beginnings, and their ends."""

    pattern: re.Pattern[str]
    heads: frozenset[str]
    tails: frozenset[str]
    longest: int


@lru_cache(1)
def _shapes(names: tuple[str, ...]) -> _Shapes:
    longest_first = sorted(names, key=len, reverse=True)
    return _Shapes(
        re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
        frozenset(name[:size] for name in names for size in range(1, len(name))),
        frozenset(name[size:] for name in names for size in range(1, len(name))),
        max(map(len, names), default=0),
    )
