"""Calls of tools in a text that may have some: how models write them, and how they are read as they
come.

With ``tool_choice`` ``required`` or a named function a grammar holds the text, and nothing of this
is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

_OTHER_FORMATS = ("<function=", "<arg_key>", "[ARGS]")
"""Marks of templates that write a known mark and something else than JSON behind it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls as JSON: each between ``opening`` and ``closing``, or (no
    ``closing``) as all of its text.

    Then ``opening`` may be missing, as it is often a special token, which is no text; the text
    begins with ``begins``. ``marks`` are what a chat template is known by.
    """

    name: str
    marks: tuple[str, ...]
    opening: str
    closing: str = ""
    begins: str = ""


FORMATS = (
    CallFormat("Hermes", ("<tool_call>",), "<tool_call>", "</tool_call>"),
    CallFormat("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", begins='[{"'),
    CallFormat(
        "Llama 3",
        ("<|python_tag|>", '"parameters": dictionary of argument name'),
        "<|python_tag|>",
        begins='{"',
    ),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; ``arguments`` are JSON."""

    name: str
    arguments: str


def call_format(template: str) -> CallFormat | None:
    """Return the format that a chat template teaches, None where it is not known or no tools are
    shown to the model.
    """
    if "tools" not in template or any(mark in template for mark in _OTHER_FORMATS):
        return None
    return next((form for form in FORMATS if any(mark in template for mark in form.marks)), None)


class CallReader:
    """Separates a text that comes in pieces into content and calls: what may become a call is held
    back until that is known.

    What turns out to be no call of one of the functions ``names`` is content, letter by letter.
    """

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        self._called = False
        self._plain = False  # of a format whose calls are all of the text: this one has none

    def read(self, text: str, *, ended: bool) -> tuple[str, list[Call]]:
        """Return the content and the calls that are certain with this piece."""
        self._held += text
        if self._plain or not self._form.closing:
            return self._whole(ended)
        content, calls = "", list[Call]()
        while (found := self._next(ended)) is not None:
            before, call, behind = found
            made = parse_calls(call, self._names)
            if made is None:
                content += self._held[: len(self._held) - len(behind)]
            else:
                content += before.rstrip()
                calls += made
                self._called = True
            self._held = behind
        safe = len(self._held) if ended else self._safe()
        rest, self._held = self._held[:safe], self._held[safe:]
        return content + (rest.rstrip() if self._called else rest), calls

    def _next(self, ended: bool) -> tuple[str, str, str] | None:
        """Return what is before the first call, the call and what is behind it; None where none is
        complete.
        """
        before, opening, rest = self._held.partition(self._form.opening)
        call, closing, behind = rest.partition(self._form.closing)
        return (before, call, behind) if opening and (closing or ended) else None

    def _safe(self) -> int:
        """Return how much of the text can be no part of a call, nor blanks before one."""
        opening = self._form.opening
        at = self._held.find(opening)
        if at < 0:
            sizes = range(min(len(opening) - 1, len(self._held)), 0, -1)
            at = len(self._held) - next((n for n in sizes if self._held.endswith(opening[:n])), 0)
        return len(self._held[:at].rstrip())

    def _whole(self, ended: bool) -> tuple[str, list[Call]]:
        opening, begins = self._form.opening, self._form.begins
        text = self._held.strip().removeprefix(opening)
        start = "".join(text.split())
        if not self._plain and ended:
            if (calls := parse_calls(text, self._names)) is not None:
                return "", calls
        elif not self._plain and (
            start.startswith(begins) or begins.startswith(start) or opening.startswith(text)
        ):
            return "", []
        self._plain = True
        content, self._held = self._held, ""
        return content, []


def parse_calls(text: str, names: Collection[str]) -> list[Call] | None:
    """Return the calls of functions ``names`` that a text is, one or several or a list of them;
    None for any other text.
    """
    decoder, values, text = json.JSONDecoder(), [], text.strip()
    try:
        while text:
            value, end = decoder.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip(" \t\r\n;,")
        return [_call(value, names) for value in values] or None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _call(value: dict[str, object], names: Collection[str]) -> Call:
    """Return what a value calls. Raises an error for what is no call."""
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if value["name"] not in names or not isinstance(arguments, dict):
        raise ValueError("no call")
    return Call(str(value["name"]), json.dumps(arguments, ensure_ascii=False))
