"""Reasoning that a model writes before its answer, between marks: which marks a chat template uses,
and how the two are separated as the text comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar


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


class _Place(Enum):
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
        self._place = _Place.START
        self._waiting = ""
        self._has_reasoning = False

    def read(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return the reasoning and the answer that are certain with this piece."""
        self._waiting += text
        if self._place is _Place.START:
            self._enter(ended)
        reasoning = self._inside(ended) if self._place is _Place.INSIDE else ""
        if self._place is _Place.AFTER and (answer := self._waiting.lstrip()):
            self._waiting, self._place = answer, _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return reasoning, ""
        answer, self._waiting = self._waiting, ""
        return reasoning, answer

    def _enter(self, ended: bool) -> None:
        """Go inside or to the answer, once the text's beginning says which."""
        opening, begun = self._form.opening, self._waiting.lstrip()
        if begun.startswith(opening):
            self._waiting, self._place = begun.removeprefix(opening), _Place.INSIDE
        elif ended or not opening.startswith(begun):
            self._place = _Place.INSIDE if self._is_open else _Place.ANSWER

    def _inside(self, ended: bool) -> str:
        """Return what is certain to be reasoning."""
        reasoning, closing, rest = self._waiting.partition(self._form.closing)
        if closing:
            self._waiting, self._place = rest, _Place.AFTER
        certain = reasoning if closing or ended else without_start_of(self._form.closing, reasoning)
        certain = certain.rstrip()
        if not closing:
            self._waiting = "" if ended else self._waiting[len(certain) :]
        if not self._has_reasoning:
            certain = certain.lstrip()
            self._has_reasoning = bool(certain)
        return certain


def without_start_of(mark: str, text: str) -> str:
    """Return a text without an end that may become the mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return text[: len(text) - next((size for size in sizes if text.endswith(mark[:size])), 0)]
