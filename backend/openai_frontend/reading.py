"""Reading of a chat's text: reasoning, content and calls, each as soon as it is certain."""

from __future__ import annotations

import json

from backend.openai_frontend.call_bodies import dumped
from backend.openai_frontend.calls import CallReader
from backend.openai_frontend.channels import Channels
from backend.openai_frontend.parts import Call, Parts
from backend.openai_frontend.reasoning import Reasoning, ReasoningReader

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
            return "", [Call(call["name"], dumped(call["parameters"]))]
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
