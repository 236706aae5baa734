"""Reading of a chat's text: reasoning, content and calls, each as soon as it is certain."""

from __future__ import annotations

import json

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
        self._text = ""

    def read(self, text: str, *, ended: bool) -> tuple[str, list[Call]]:
        """Return the call at the end, or as content what names no function, as a text that was cut
        may.
        """
        self._text += text
        if not ended:
            return "", []
        text, self._text = self._text, ""
        if self._tool and text:
            return "", [Call(self._tool, text)]
        try:
            call = json.loads(text)
            arguments = json.dumps(call["parameters"], ensure_ascii=False)
            return "", [Call(call["name"], arguments)]
        except (ValueError, KeyError, TypeError):
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

    def read(self, text: str, *, ended: bool) -> Parts:
        """Return what is certain with this piece."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(text, ended=ended)
        if self._answer is None:
            return Parts(reasoning, text)
        return Parts(reasoning, *self._answer.read(text, ended=ended))
