"""Messages on channels, as gpt-oss writes them (OpenAI calls the format harmony).

A message is a header, ``<|message|>`` and a body. The header says on which channel it is, and which
function it calls: ``<|channel|>commentary to=functions.NAME <|constrain|>json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from backend.openai_frontend.call_bodies import Functions, arguments_call
from backend.openai_frontend.parts import Parts

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CONSTRAIN = "<|constrain|>"
_LONGEST_HEADER = 200
_MARKED = r"(?:<\|\w+\|>|to=)(?:[\w\s=.\-]|<\|\w+\|>)*"
_HEADER = re.compile(rf"\s*(?:{_MARKED})?")
_HEADER_START = re.compile(rf"\s*(?:{_MARKED}|to?)?(?:<(?:\|(?:\w+\|?)?)?)?")
_BODY_END = re.compile(r"<\|(end|call|return|start|channel)\|>")
_MARK_START = re.compile(r"<(?:\|(?:\w{1,9}\|?)?)?\Z")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_ON_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def has_channels(template: str) -> bool:
    """Return whether a chat template writes messages on channels."""
    return CHANNEL in template and MESSAGE in template


@dataclass(frozen=True, slots=True)
class Channels:
    """The text of an answer is messages on channels."""

    splits: bool
    """Whether reasoning is apart from the content."""


class _Body(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChannelReader:
    """Reads a text that comes in pieces: reasoning is on the channel ``analysis``, calls are to
    ``functions``, and other messages are content.

    A call of another function, or one that is cut off, is content, marks and all. So is a text that
    begins without a header.
    """

    def __init__(self, functions: Functions, *, splits: bool = True) -> None:
        """Read calls of ``functions``; with ``splits`` false reasoning is content, too."""
        self._functions = functions
        self._splits = splits
        self._waiting = ""
        self._header = ""
        self._body: _Body | None = None  # None: in a header
        self._begun = set[_Body]()  # kinds of messages that have some text
        self._is_new = True  # the message has no text yet

    def read(self, text: str, *, ended: bool) -> Parts:
        """Return what is certain with this piece."""
        self._waiting += text
        parts = Parts()
        while self._takes_header(ended) if self._body is None else self._takes_body(parts, ended):
            pass
        return parts

    def _takes_header(self, ended: bool) -> bool:
        """Return whether a body is next; at the end, what may be a header is dropped."""
        header, mark, rest = self._waiting.partition(MESSAGE)
        if mark and _is_header(header):
            self._header, self._waiting = header + mark, rest
            self._body = self._kind_of(header)
        elif _may_be_header(self._waiting):
            self._waiting = "" if ended else self._waiting
        else:
            self._header, self._body = "", _Body.CONTENT
        self._is_new = True
        return self._body is not None

    def _kind_of(self, header: str) -> _Body:
        if _RECIPIENT.search(header):
            return _Body.CALL
        channels = _ON_CHANNEL.findall(header)
        is_reasoning = self._splits and channels[-1:] == ["analysis"]
        return _Body.REASONING if is_reasoning else _Body.CONTENT

    def _takes_body(self, parts: Parts, ended: bool) -> bool:
        """Add what is certain of a message; return whether its end is."""
        text, kind = self._waiting, self._body
        # a mark that begins a text without a header is part of it
        end = _BODY_END.search(text, 0 if self._header or not self._is_new else 1)
        if kind is _Body.CALL and end is None and not ended:
            return False
        unsure = None if end is not None or ended else _MARK_START.search(text)
        at = end.start() if end else unsure.start() if unsure else len(text)
        if kind is _Body.CALL:
            self._add_call(parts, text[:at], end[0] if end else "")
        elif kind is not None:
            self._add(parts, kind, text[:at])
        if end is None:
            self._waiting = text[at:]
            return False
        self._waiting = text[at:] if end[0] in (START, CHANNEL) else text[end.end() :]
        self._body = None
        return True

    def _add_call(self, parts: Parts, arguments: str, end: str) -> None:
        recipient = _RECIPIENT.search(self._header)
        call = arguments_call(recipient[1], arguments, self._functions) if recipient else None
        if call is not None:
            parts.calls.append(call)
        else:
            end = "" if end in (START, CHANNEL) else end
            self._add(parts, _Body.CONTENT, self._header + arguments + end)

    def _add(self, parts: Parts, kind: _Body, text: str) -> None:
        """Add a text; messages of one kind are lines."""
        if not text:
            return
        if self._is_new and kind in self._begun:
            text = "\n" + text
        self._is_new = False
        self._begun.add(kind)
        if kind is _Body.REASONING:
            parts.reasoning += text
        else:
            parts.content += text


def _is_header(text: str) -> bool:
    return len(text) <= _LONGEST_HEADER and _HEADER.fullmatch(text) is not None


def _may_be_header(text: str) -> bool:
    """Return whether a text may become a header with its mark."""
    longest = _LONGEST_HEADER + len(MESSAGE) - 1
    return len(text) <= longest and _HEADER_START.fullmatch(text) is not None
