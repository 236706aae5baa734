"""Calls of tools in a text that may have some: how models write them, and how they are read as they
come.

With ``tool_choice`` ``required`` or a named function a grammar holds the text, and nothing of this
is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backend.openai_frontend.call_bodies import (
    JSON,
    FunctionGemmaNotation,
    Functions,
    NamedNotation,
    Notation,
    PythonNotation,
    TagNotation,
)
from backend.openai_frontend.parts import Call
from backend.openai_frontend.reasoning import without_start_of

_OTHER_NOTATION = "<function="
"""A mark of templates that write a known mark and another notation after it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls, and how its chat template is known."""

    name: str
    marks: tuple[str, ...]
    """A template of the format has one of these."""
    opening: str = ""
    """Text before a call. Without ``closing`` it may be missing, as it is often a special
    token, which is no text.
    """
    closing: str = ""
    """Text after a call; '': calls are all of the text."""
    begins: str = ""
    """How a text begins that is all calls."""
    fence: str = ""
    """Text that may end a text which is all calls."""
    notation: Notation = JSON
    also: str = ""
    """A template of the format has this, too."""
    must_close: bool = False
    """Without ``closing`` a call may be incomplete."""


_JSON_OF_LLAMA = '"parameters": dictionary of argument name'
FORMATS = (
    CallFormat(
        "GLM 4.5",
        ("<arg_key>",),
        "<tool_call>",
        "</tool_call>",
        notation=TagNotation(
            re.compile(r"\s*([^\s<]+)\s*"),
            re.compile(
                r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
            ),
        ),
        must_close=True,
    ),
    CallFormat(
        "Qwen3-Coder",
        ("<parameter=",),
        "<tool_call>",
        "</tool_call>",
        notation=TagNotation(
            re.compile(r"\s*<function=([^>\n]+)>\s*"),
            re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
            end="</function>",
        ),
        also="<function=",
    ),
    CallFormat("Hermes", ("<tool_call>",), "<tool_call>", "</tool_call>"),
    CallFormat(
        "DeepSeek",
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        notation=NamedNotation(
            re.compile(
                r"\s*<｜tool▁call▁begin｜>"
                r"(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\n<]+)<｜tool▁sep｜>)\s*"
            ),
            re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*"),
        ),
        must_close=True,
    ),
    CallFormat(
        "Mistral, names before arguments",
        ("[ARGS]",),
        "[TOOL_CALLS]",
        "</s>",
        notation=NamedNotation(
            re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*"),
            re.compile(r"\s*"),
        ),
        also="[TOOL_CALLS]",
    ),
    CallFormat(
        "FunctionGemma",
        ("<start_function_call>",),
        "<start_function_call>",
        "<end_function_call>",
        notation=FunctionGemmaNotation(),
        must_close=True,
    ),
    CallFormat("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", begins='[{"'),
    CallFormat("Gemma 3 code", ("tool_code",), "```tool_code", "```", notation=PythonNotation()),
    CallFormat("Pythonic", ("func_name1(",), begins="[", notation=PythonNotation()),
    CallFormat(
        "Gemma 3 JSON",
        (_JSON_OF_LLAMA,),
        "```json",
        begins='{"',
        fence="```",
        also="<start_of_turn>",
    ),
    CallFormat("Llama 3", ("<|python_tag|>", _JSON_OF_LLAMA), "<|python_tag|>", begins='{"'),
)


def call_format(template: str) -> CallFormat | None:
    """Return the format that a chat template teaches, None where it is not known or no tools are
    shown to the model.
    """
    if "tools" not in template:
        return None
    form = next((form for form in FORMATS if _is_taught(form, template)), None)
    is_json = form is not None and form.notation is JSON
    return None if is_json and _OTHER_NOTATION in template else form


def _is_taught(form: CallFormat, template: str) -> bool:
    return form.also in template and any(mark in template for mark in form.marks)


class CallReader:
    """Separates a text that comes in pieces into content and calls: what may become a call is held
    back until that is known.

    Text that turns out to be no call of one of the ``functions`` is content, letter by letter.
    """

    def __init__(self, form: CallFormat, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._withheld = ""
        self._called = False
        self._plain = False  # of a format whose calls are all of the text: this one has none

    def read(self, text: str, *, ended: bool) -> tuple[str, list[Call]]:
        """Return the content and the calls that are certain with this piece."""
        self._withheld += text
        if self._plain or not self._form.closing:
            return self._whole(ended)
        content, calls = "", list[Call]()
        while (found := self._next(ended)) is not None:
            before, call, after = found
            made = self._form.notation.calls(call, self._functions)
            if made is None:
                content += self._withheld[: len(self._withheld) - len(after)]
            else:
                content += before.rstrip()
                calls += made
                self._called = True
            self._withheld = after
        safe = len(self._withheld) if ended else self._safe()
        rest, self._withheld = self._withheld[:safe], self._withheld[safe:]
        return content + (rest.rstrip() if self._called else rest), calls

    def _next(self, ended: bool) -> tuple[str, str, str] | None:
        """Return what is before the first call, the call and what is after it; None where none is
        complete.
        """
        before, opening, rest = self._withheld.partition(self._form.opening)
        call, closing, after = rest.partition(self._form.closing)
        is_complete = closing or (ended and not self._form.must_close)
        return (before, call, after) if opening and is_complete else None

    def _safe(self) -> int:
        """Return how much of the text can be no part of a call, nor blanks before one."""
        opening = self._form.opening
        at = self._withheld.find(opening)
        before = without_start_of(opening, self._withheld) if at < 0 else self._withheld[:at]
        return len(before.rstrip())

    def _whole(self, ended: bool) -> tuple[str, list[Call]]:
        opening, begins = self._form.opening, self._form.begins
        text = self._withheld.strip().removeprefix(opening)
        if ended and self._form.fence:
            text = text.removesuffix(self._form.fence)
        start = "".join(text.split())
        if not self._plain and ended:
            if (calls := self._form.notation.calls(text, self._functions)) is not None:
                return "", calls
        elif not self._plain and (
            start.startswith(begins) or begins.startswith(start) or opening.startswith(text)
        ):
            return "", []
        self._plain = True
        content, self._withheld = self._withheld, ""
        return content, []
