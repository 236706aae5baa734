"""Calls of tools in a text that comes in pieces: how models write them, and how they are read.

With ``tool_choice`` ``required`` or a named function a grammar holds the text, and nothing of this
is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from backend.openai_frontend.call_bodies import (
    JSON,
    Call,
    Cursor,
    DeepSeekNotation,
    FunctionGemmaNotation,
    Functions,
    JsonNotation,
    MistralNotation,
    Notation,
    PythonNotation,
    TagNotation,
)

_OTHER_NOTATION = "<function="
"""A mark of templates that write a known mark and another notation after it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls, and how its chat template is known."""

    name: str
    marks: tuple[str, ...]
    """A template of the format has one of these."""
    openings: tuple[str, ...] = ()
    """Texts before calls; several may follow one another."""
    closings: tuple[str, ...] = ()
    """Texts that end calls, as the end of the text does."""
    trailing: tuple[str, ...] = ()
    """Texts that may follow a call and its closing."""
    begins: tuple[str, ...] = ()
    """How a text begins, blanks aside, that is all calls; an opening may be missing, as it is often
    a special token, which is no text.
    """
    begins_with_name: bool = False
    """Such a text may also begin with a function's name and ``(``."""
    notation: Notation = JSON
    also: str = ""
    """A template of the format has this, too."""
    must_close: bool = False
    """Without a closing, a text that was cut has no call: some of its arguments may be missing."""


_JSON_OF_LLAMA = '"parameters": dictionary of argument name'
FORMATS = (
    CallFormat(
        "GLM 4.5",
        ("<arg_key>",),
        ("<tool_call>",),
        ("</tool_call>",),
        notation=TagNotation("\n", "<arg_key>", "<arg_value>", "</arg_value>", "</arg_key>"),
        must_close=True,
    ),
    CallFormat(
        "Qwen3-Coder",
        ("<parameter=",),
        ("<tool_call>", "<seed:tool_call>", "<function="),
        ("</function>", "</tool_call>", "</seed:tool_call>"),
        ("</tool_call>", "</seed:tool_call>"),
        notation=TagNotation(">", "<parameter=", ">", "</parameter>", has_lines=True),
        also="<function=",
        must_close=True,
    ),
    CallFormat("Hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",)),
    CallFormat(
        "DeepSeek",
        ("<｜tool▁call▁begin｜>",),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁calls｜>",
            "<｜tool_calls_begin｜>",
            "<｜tool calls begin｜>",
            "<｜tool\\_calls\\_begin｜>",  # as distilled models write it
        ),
        ("<｜tool▁calls▁end｜>",),
        notation=DeepSeekNotation(),
    ),
    CallFormat(
        "Mistral, names before arguments",
        ("[ARGS]",),
        ("[TOOL_CALLS]",),
        notation=MistralNotation(),
        also="[TOOL_CALLS]",
    ),
    CallFormat(
        "FunctionGemma",
        ("<start_function_call>",),
        ("<start_function_call>",),
        ("<end_function_call>",),
        notation=FunctionGemmaNotation(),
    ),
    CallFormat(
        "Mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        begins=('[{"', '{"'),
        notation=MistralNotation(),
    ),
    CallFormat(
        "Gemma 3 code", ("tool_code",), ("```tool_code",), ("```",), notation=PythonNotation()
    ),
    CallFormat(
        "Pythonic",
        ("func_name1(",),
        begins=("[", '{"'),
        begins_with_name=True,
        notation=PythonNotation(),
    ),
    CallFormat(
        "Gemma 3 JSON",
        (_JSON_OF_LLAMA,),
        ("```json",),
        begins=('{"',),
        notation=JsonNotation(fence="```"),
        also="<start_of_turn>",
    ),
    CallFormat("Llama 3", ("<|python_tag|>", _JSON_OF_LLAMA), ("<|python_tag|>",), begins=('{"',)),
)


def call_format(template: str) -> CallFormat | None:
    """Return the format that a chat template teaches, None where it is not known or no tools are
    shown to the model.
    """
    if "tools" not in template:
        return None
    taught = (
        form
        for form in FORMATS
        if form.also in template and any(mark in template for mark in form.marks)
    )
    form = next(taught, None)
    is_json = form is not None and isinstance(form.notation, JsonNotation)
    return None if is_json and _OTHER_NOTATION in template else form


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
        match = wanted.pattern.search(self._text, self._at)
        start = self._at if match is None else match.start()
        end = len(self._text) if ended else wanted.unsure(self._text, start)
        if match is None or end == start:
            return self.skip(end - self._at), ""
        before, self._at = self._text[self._at : start], match.end()
        return before, match[0]

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


class CallReader:
    """Separates a text that comes in pieces into content and calls: what may become a call is held
    back until that is known.

    Text that turns out to be no call of one of the ``functions`` is content, letter by letter.
    """

    def __init__(self, form: CallFormat, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._openings, self._closings = marks(*form.openings), marks(*form.closings)
        self._after_call = marks(*form.openings, *form.trailing)
        self._scanner = Scanner()
        self._blanks = Blanks()  # which are no content before a call
        self._early: list[str] = []  # until the first letters say whether all may be calls
        self._start = ""  # the first letters, without blanks
        names = functions if form.begins_with_name else ()
        self._begins = (*form.begins, *(f"{name}(" for name in names))
        self._has_begun = not self._begins
        self._is_in_block = False
        self._block: list[str] = []  # what may be calls, so far
        self._has_called = self._has_just_called = False
        self._content: list[str] = []  # of this piece
        self._calls: list[Call] = []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> tuple[str, list[Call]]:
        """Return the content and the calls that are certain with this piece. ``cut``: the text
        ended before it was whole.
        """
        self._content, self._calls = [], []
        if not self._has_begun:
            text = self._begin(text, ended)
        self._scanner.feed(text)
        while self._reads_block(ended, cut) if self._is_in_block else self._reads_content(ended):
            pass
        if ended and not self._has_called:
            self._content.append(self._blanks.take())
        return "".join(self._content), self._calls

    def _begin(self, text: str, ended: bool) -> str:
        """Return the text so far once its first letters say whether all of it may be calls."""
        self._early.append(text)
        self._start += "".join(text.split())
        if self._start.startswith(self._begins):
            self._is_in_block, self._closings = True, marks()
        elif not ended and any(each.startswith(self._start) for each in self._begins):
            return ""
        self._has_begun = True
        return "".join(self._early)

    def _reads_content(self, ended: bool) -> bool:
        """Take content up to the next mark; return whether there is one."""
        wanted = self._after_call if self._has_just_called else self._openings
        before, mark = self._scanner.take(wanted, ended=ended)
        self._add(before)
        if mark in self._form.openings:
            self._is_in_block, self._block = True, [mark]
        elif mark and self._has_just_called:
            self._blanks.take()
        else:
            self._add(mark)
        return bool(mark)

    def _reads_block(self, ended: bool, cut: bool) -> bool:
        """Take what may be calls up to its closing; return whether there is one."""
        before, closing = self._scanner.take(self._closings, ended=ended)
        self._block.append(before)
        if not closing and not ended:
            return False
        text, self._block = "".join(self._block), []
        self._is_in_block = False
        if not self._is_call(text, closing, cut):
            self._add_segments(text, closing, cut)
        return bool(closing)

    def _add_segments(self, block: str, closing: str, cut: bool) -> None:
        """Read each part of a block that begins with an opening by itself."""
        starts, end = [0], 0
        for match in self._openings.pattern.finditer(block):
            if block[end : match.start()].strip():
                starts.append(match.start())
            end = match.end()
        for low, high in pairwise([*starts, len(block)]):
            text, mark = block[low:high], closing if high == len(block) else ""
            is_new = len(starts) > 1
            if not (is_new and self._is_call(text, mark, cut and high == len(block))):
                self._add(text + mark)

    def _is_call(self, text: str, closing: str, cut: bool) -> bool:
        """Return whether a text is calls, and add them."""
        if cut and not closing and self._form.must_close:
            return False
        cursor = Cursor(text)
        while cursor.skip(*self._form.openings):
            pass
        calls = self._form.notation.calls(cursor.rest(), self._functions)
        if calls is None:
            return False
        self._blanks.take()
        self._calls += calls
        self._has_called = self._has_just_called = True
        return True

    def _add(self, text: str) -> None:
        """Add content."""
        if certain := self._blanks.add(text):
            self._content.append(certain)
            self._has_just_called = False
