"""Reading of a chat's text: reasoning, content and calls, each as soon as it is certain.

Reasoning is between marks before the answer, or on a channel of gpt-oss (OpenAI calls the format
harmony): a message is a header, ``<|message|>`` and a body. The header says on which channel it is,
and which function it calls: ``<|channel|>commentary to=functions.NAME <|constrain|>json``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from backend.openai_frontend.call_bodies import Call, Functions, arguments_call, dump
from backend.openai_frontend.calls import Blanks, CallReader, Parts, Scanner, marks

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


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    opening: str
    closing: str


FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that the text after one prompt may begin with."""

    form: ReasoningFormat
    is_open: bool
    """The prompt ends in the opening mark, so that the text begins inside."""
    splits: ClassVar[bool] = True
    """Whether reasoning is apart from the content."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the marks that a chat template uses, None where it marks no reasoning."""
    return next((form for form in FORMATS if form.closing in template), None)


def reasoning_after(form: ReasoningFormat | None, prompt: str) -> Reasoning | None:
    """Return how the text after a prompt may begin; None where it has no reasoning, as after a
    prompt that closes it.
    """
    end = prompt.rstrip()
    if form is None or end.endswith(form.closing):
        return None
    return Reasoning(form, end.endswith(form.opening))


class _ReasoningState(Enum):
    START = auto()
    INSIDE = auto()
    AFTER = auto()
    ANSWER = auto()


class ReasoningReader:
    """Separates a text that comes in pieces into reasoning and answer. Marks, and blanks next to
    them, are part of neither; what may become a mark waits until that is known.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._form = reasoning.form
        self._is_open = reasoning.is_open
        self._place = _ReasoningState.START
        self._scanner = Scanner()
        self._blanks = Blanks()
        self._start = ""  # the text's first letters, without blanks before them
        self._has_reasoning = False

    def read(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return the reasoning and the answer that are certain with this piece."""
        if self._place is _ReasoningState.START:
            text = self._enter(text, ended)
        self._scanner.feed(text)
        reasoning = self._inside(ended) if self._place is _ReasoningState.INSIDE else ""
        if self._place not in (_ReasoningState.AFTER, _ReasoningState.ANSWER):
            return reasoning, ""
        answer = self._scanner.rest()
        if self._place is _ReasoningState.AFTER and (answer := answer.lstrip()):
            self._place = _ReasoningState.ANSWER
        return reasoning, answer

    def _enter(self, text: str, ended: bool) -> str:
        """Go inside or to the answer, once the text's beginning says which; return the text from
        there on.
        """
        opening, solid = self._form.opening, text if self._start else text.lstrip()
        if not self._start:
            self._blanks.add(text[: len(text) - len(solid)])
        self._start += solid
        if self._start.startswith(opening):
            self._blanks.take()
            self._place = _ReasoningState.INSIDE
            return self._start.removeprefix(opening)
        if not ended and opening.startswith(self._start):
            return ""
        self._place = _ReasoningState.INSIDE if self._is_open else _ReasoningState.ANSWER
        return self._blanks.take() + self._start

    def _inside(self, ended: bool) -> str:
        """Return what is certain to be reasoning."""
        before, closing = self._scanner.take(marks(self._form.closing), ended=ended)
        certain = self._blanks.add(before)
        if closing:
            self._place = _ReasoningState.AFTER
        if not self._has_reasoning:
            certain = certain.lstrip()
            self._has_reasoning = bool(certain)
        return certain


def has_channels(template: str) -> bool:
    """Return whether a chat template writes messages on channels."""
    return CHANNEL in template and MESSAGE in template


@dataclass(frozen=True, slots=True)
class Channels:
    """The text of an answer is messages on channels."""

    splits: bool
    """Whether reasoning is apart from the content."""


class _MessageKind(Enum):
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
        self._body: _MessageKind | None = None  # None: in a header
        self._arguments: list[str] = []  # of the call that has begun
        self._kinds_with_text = set[_MessageKind]()  # kinds of messages that have some text
        self._is_new = True  # the message has no text yet
        self._texts: dict[_MessageKind, list[str]] = {}  # of this piece
        self._calls: list[Call] = []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> Parts:
        """Return what is certain with this piece. ``cut``: the text ended before it was whole."""
        self._scanner.feed(text)
        self._texts, self._calls = {_MessageKind.REASONING: [], _MessageKind.CONTENT: []}, []
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
            self._header, self._body = "", _MessageKind.CONTENT
        return self._body is not None

    def _kind_of(self, header: str) -> _MessageKind:
        if _RECIPIENT.search(header):
            return _MessageKind.CALL
        channels = _ON_CHANNEL.findall(header)
        is_reasoning = self._splits and channels[-1:] == ["analysis"]
        return _MessageKind.REASONING if is_reasoning else _MessageKind.CONTENT

    def _takes_body(self, ended: bool, cut: bool) -> bool:
        """Add what is certain of a message; return whether its end is."""
        if self._is_new and not self._header:  # a mark that begins such a text is part of it
            self._add(_MessageKind.CONTENT, self._scanner.skip(1))
        text, end = self._scanner.take(_BODY_ENDS, ended=ended)
        if self._body is not _MessageKind.CALL:
            self._add(self._body or _MessageKind.CONTENT, text)
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
            self._add(
                _MessageKind.CONTENT, self._header + arguments + ("" if end in _NEXT else end)
            )

    def _add(self, kind: _MessageKind, text: str) -> None:
        """Add a text; messages of one kind are lines."""
        if not text:
            return
        if self._is_new and kind in self._kinds_with_text:
            text = "\n" + text
        self._is_new = False
        self._kinds_with_text.add(kind)
        self._texts[kind].append(text)


Frame = Reasoning | Channels
"""Text around the content of an answer: marks of reasoning, or messages on channels."""


class ForcedCallReader:
    """Reads a text that a grammar has made a call: the arguments of the function ``tool``, or ('')
    a call that names its own.
    """

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self._pieces: list[str] = []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> tuple[str, list[Call]]:
        """Return the call at the end, or as content what names no function, as a text that was cut
        may.
        """
        del cut  # the arguments of a call that was cut are what has come of them
        self._pieces.append(text)
        if not ended:
            return "", []
        text, self._pieces = "".join(self._pieces), []
        if self._tool and text:
            return "", [Call(self._tool, text)]
        try:
            call = json.loads(text)
            return "", [Call(call["name"], dump(call["parameters"]))]
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []


class Reader:
    """Reads a text that comes in pieces: reasoning, if it may begin with some, and then ``answer``
    says what is content and what calls. Every cut gives the same parts.
    """

    def __init__(
        self, reasoning: Reasoning | None, answer: CallReader | ForcedCallReader | None
    ) -> None:
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning)
        self._answer = answer

    def read(self, text: str, *, ended: bool, cut: bool = False) -> Parts:
        """Return what is certain with this piece. ``cut``: the text ended before it was whole."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(text, ended=ended)
        if self._answer is None:
            return Parts(reasoning, text)
        return Parts(reasoning, *self._answer.read(text, ended=ended, cut=cut))
