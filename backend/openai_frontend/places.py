"""Places of the tokens of a completion in its text, and their names there."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable


def token_text(data: bytes) -> str:
    r"""Return a token as OpenAI's completions write it: ``bytes:\xf0\x9f`` for a part of a
    character.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _escaped(data)


def by_text(tokens: Iterable[tuple[bytes, float]]) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by their texts, best first. Two tokens
    of one text, such as a letter and its byte, differ by the form of the second.
    """
    named: dict[str, float] = {}
    for data, log_prob in tokens:
        text = token_text(data)
        named.setdefault(_escaped(data) if text in named else text, log_prob)
    return named


def _escaped(data: bytes) -> str:
    letters = (chr(b) if 0x20 <= b < 0x7F and b != ord("\\") else f"\\x{b:02x}" for b in data)
    return "bytes:" + "".join(letters)


class Places:
    """Counts characters along the tokens of a text. ``echoed`` is the prompt as the text has it,
    ``special`` are the names of special tokens, which are no text of an output.
    """

    def __init__(self, echoed: str, special: Collection[bytes]) -> None:
        self._echoed = echoed
        self._special = special
        self._at = 0
        self._incomplete = b""

    def of_prompt(self, tokens: Iterable[bytes]) -> list[int]:
        """Return the offsets of all tokens of the prompt. The echoed text has a special token
        where the client wrote its name, none that the tokenizer added, nor the blank that some
        tokenizers put before a text.
        """
        offsets = []
        for data in tokens:
            if data in self._special:
                offsets.append(self._at)
                name = data.decode()
                self._at += len(name) if self._echoed.startswith(name, self._at) else 0
                continue
            begins = self._at == 0 and not self._incomplete
            added = begins and data.startswith(b" ") and not self._echoed.startswith(" ")
            offsets.append(self._take(data[1:] if added else data))
        self._at, self._incomplete = len(self._echoed), b""
        return [min(offset, len(self._echoed)) for offset in offsets]

    def of_output(self, tokens: Iterable[bytes]) -> list[int]:
        """Return the offsets of the next tokens."""
        return [self._take(b"" if data in self._special else data) for data in tokens]

    def _take(self, data: bytes) -> int:
        """Return the number of the character that a token begins in, and move past the token."""
        at, pending = self._at, self._incomplete
        if pending and data:
            text, read = codecs.utf_8_decode(pending + data[:1], "replace", False)
            # the token goes on with another character where it does not go on with this one
            at += len(text) == 2 or (len(text) == 1 and read == len(pending))
        text, read = codecs.utf_8_decode(pending + data, "replace", False)
        self._at += len(text)
        self._incomplete = (pending + data)[read:]
        return at
