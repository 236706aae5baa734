"""The words that end a text; those that name special tokens are found in the tokens, too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

_FIRST_MARK = 0xD800
"""Half of a surrogate pair, which no text has: it and the next ones stand for special tokens."""


class StopWords:
    """Finds where the first stop word of a text begins, or may begin.

    A special token is no text, so it is matched apart: a word that names some has a mark in the
    place of each, and so has the text, at the places of those that came.
    """

    def __init__(
        self,
        words: Seq[str],
        special_tokens: Mapping[str, int],
        end_ids: Collection[int],
    ) -> None:
        """Take ids of special tokens by name. A word that is one end id adds nothing to that."""
        self._words = tuple(word for word in words if word)
        named = [name for name in special_tokens if any(name in word for word in self._words)]
        marks = {name: chr(_FIRST_MARK + n) for n, name in enumerate(named)}
        self.marks = {special_tokens[name]: mark for name, mark in marks.items()}
        self._marked: tuple[str, ...] = ()
        if named:
            pattern = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
            patterns = [re.sub(pattern, lambda name: marks[name[0]], word) for word in self._words]
            ends = {self.marks.get(token) for token in end_ids}
            self._marked = tuple(w for w in patterns if w not in self._words and w not in ends)
        self._longest = max(map(len, self._words), default=0)
        self._places: list[tuple[int, str]] = []  # of marks, in the text

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._words)

    def note(self, token: int, place: int) -> None:
        """Take note of a special token that came at this place of the text."""
        if (mark := self.marks.get(token)) is not None:
            self._places = [*self._places[1 - self._longest :], (place, mark)]

    def find(self, text: str, start: int) -> int:
        """Return where the first of them begins in a text, from ``start`` on; -1: nowhere."""
        places_found = [at for word in self._words if (at := text.find(word, start)) >= 0]
        if self._places:
            marked = self._with_marks(text, start)
            places = [at for word in self._marked if (at := marked.find(word)) >= 0]
            places_found += [start + at - _count_marks(marked[:at]) for at in places]
        return min(places_found, default=-1)

    def first_place(self, text: str) -> int:
        """Return where in a text that has none of them one may begin at the earliest, with more
        text.
        """
        return len(text) - self._longest + 1

    def most_at_end(self, text: str, start: int) -> int:
        """Return how many characters at the end of a text, from ``start`` on, may begin one."""
        most = _longest_prefix_at_end(text[start:], self._words)
        if self._places:
            marked = self._with_marks(text, start)
            size = _longest_prefix_at_end(marked, self._marked)
            end = marked[len(marked) - size :]
            most = max(most, size - _count_marks(end))
        return most

    def cut(self, count: int) -> None:
        """Forget this many characters at the beginning of the text."""
        self._places = [(place - count, mark) for place, mark in self._places if place >= count]

    def _with_marks(self, text: str, start: int) -> str:
        marked = ""
        for place, mark in self._places:
            if place >= start:
                marked += text[start:place] + mark
                start = place
        return marked + text[start:]


def _count_marks(text: str) -> int:
    return sum("\ud800" <= character <= "\udfff" for character in text)


def _longest_prefix_at_end(text: str, words: tuple[str, ...]) -> int:
    """Return the length of the longest end of ``text`` that begins one of ``words`` without
    completing it.
    """
    longest = max((len(word) for word in words), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return size
    return 0
