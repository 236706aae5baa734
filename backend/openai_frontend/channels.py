"""Messages on channels, as gpt-oss writes them (OpenAI calls the format harmony).

A message is a header, ``<|message|>`` and a body. The header says on which channel it is, and which
function it calls: ``<|channel|>commentary to=functions.NAME <|constrain|>json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from backend.openai_frontend.call_bodies import Functions, arguments_call
from backend.openai_frontend.parts import Call, Parts
from backend.openai_frontend.scanning import Scanner, marks

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CONSTRAIN = "<|constrain|>"
_LONGEST_HEADER = 200
_MARKED = r"(?:<\|\w+\|>|to=)(?:[\w\s=.\-]|<\|\w+\|>)*"
_HEADER = re.compile(rf"\s*(?:{_MARKED})?")
_HEADER_START = re.compile(rf"\s*(?:{_MARKED}|to?)?(?:<(?:\|(?:\w+\|?)?)?)?")
_NEXT = (START, CHANNEL)
"""Marks that begin the next message."""
_BODY_ENDS = marks(END, "<|call|>", "<|return|>", *_NEXT)
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
        self._scanner = Scanner()
        self._header = ""
        self._body: _Body | None = None  # None: in a header
        self._arguments: list[str] = []  # of the call that has begun
        self._begun = set[_Body]()  # kinds of messages that have some text
        self._is_new = True  # the message has no text yet
        self._texts: dict[_Body, list[str]] = {}  # of this piece
        self._calls: list[Call] = []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> Parts:
        """Return what is certain with this piece. ``cut``: the text ended before it was whole."""
        self._scanner.feed(text)
        self._texts, self._calls = {_Body.REASONING: [], _Body.CONTENT: []}, []
        while self._takes_header(ended) if self._body is None else self._takes_body(ended, cut):
            pass
        reasoning, content = map("".join, self._texts.values())
        return Parts(reasoning, content, self._calls)

    def _takes_header(self, ended: bool) -> bool:
        """Return whether a body is next; at the end, what may be a header is dropped."""
        self._is_new = True
        text = self._scanner.peek(_LONGEST_HEADER + len(MESSAGE))
        header, mark, _ = text.partition(MESSAGE)
        if mark and _HEADER.fullmatch(header):
            self._header = self._scanner.skip(len(header + mark))
            self._body = self._kind_of(header)
        elif len(text) < _LONGEST_HEADER + len(MESSAGE) and _HEADER_START.fullmatch(text):
            self._scanner.skip(len(text) if ended else 0)
        else:
            self._header, self._body = "", _Body.CONTENT
        return self._body is not None

    def _kind_of(self, header: str) -> _Body:
        if _RECIPIENT.search(header):
            return _Body.CALL
        channels = _ON_CHANNEL.findall(header)
        is_reasoning = self._splits and channels[-1:] == ["analysis"]
        return _Body.REASONING if is_reasoning else _Body.CONTENT

    def _takes_body(self, ended: bool, cut: bool) -> bool:
        """Add what is certain of a message; return whether its end is."""
        if self._is_new and not self._header:  # a mark that begins such a text is part of it
            self._add(_Body.CONTENT, self._scanner.skip(1))
        text, end = self._scanner.take(_BODY_ENDS, ended=ended)
        if self._body is not _Body.CALL:
            self._add(self._body or _Body.CONTENT, text)
        else:
            self._arguments.append(text)
            if end or ended:
                self._add_call(end, cut=cut and not end)
        if end:
            self._body = None
            if end in _NEXT:
                self._scanner.skip(-len(end))
        return bool(end)

    def _add_call(self, end: str, *, cut: bool) -> None:
        arguments, self._arguments = "".join(self._arguments), []
        recipient = _RECIPIENT.search(self._header)
        is_missing = cut and not arguments.strip()
        call = None
        if recipient is not None and not is_missing:
            call = arguments_call(recipient[1], arguments, self._functions)
        if call is not None:
            self._calls.append(call)
        else:
            self._add(_Body.CONTENT, self._header + arguments + ("" if end in _NEXT else end))

    def _add(self, kind: _Body, text: str) -> None:
        """Add a text; messages of one kind are lines."""
        if not text:
            return
        if self._is_new and kind in self._begun:
            text = "\n" + text
        self._is_new = False
        self._begun.add(kind)
        self._texts[kind].append(text)
