"""Reasoning that a model writes before its answer, between marks: which marks a chat template uses,
and how the two are separated as the text comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from backend.openai_frontend.scanning import Blanks, Scanner, marks


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
        self._scanner = Scanner()
        self._blanks = Blanks()
        self._start = ""  # the text's first letters, without blanks before them
        self._has_reasoning = False

    def read(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return the reasoning and the answer that are certain with this piece."""
        if self._place is _Place.START:
            text = self._enter(text, ended)
        self._scanner.feed(text)
        reasoning = self._inside(ended) if self._place is _Place.INSIDE else ""
        if self._place not in (_Place.AFTER, _Place.ANSWER):
            return reasoning, ""
        answer = self._scanner.rest()
        if self._place is _Place.AFTER and (answer := answer.lstrip()):
            self._place = _Place.ANSWER
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
            self._place = _Place.INSIDE
            return self._start.removeprefix(opening)
        if not ended and opening.startswith(self._start):
            return ""
        self._place = _Place.INSIDE if self._is_open else _Place.ANSWER
        return self._blanks.take() + self._start

    def _inside(self, ended: bool) -> str:
        """Return what is certain to be reasoning."""
        before, closing = self._scanner.take(marks(self._form.closing), ended=ended)
        certain = self._blanks.add(before)
        if closing:
            self._place = _Place.AFTER
        if not self._has_reasoning:
            certain = certain.lstrip()
            self._has_reasoning = bool(certain)
        return certain
