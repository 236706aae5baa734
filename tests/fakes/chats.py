"""Chats through the front end's route, with a Triton that writes a given text."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.routes import chat_of
from backend.openai_frontend.template import ChatTemplate
from backend.openai_frontend.triton import Piece

HEADERS = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]


class WritingTriton:
    """Writes a text in pieces of a few letters; ``prompts`` and ``options`` are what it got."""

    def __init__(self, text: str, letters: int, reason: str = "end_id") -> None:
        self._pieces = [text[at : at + letters] for at in range(0, len(text), letters)]
        self._reason = reason
        self.prompts: list[Any] = []
        self.options: dict[str, Any] = {}

    async def generate(self, prompts: Any, options: Any, names: Any, n: int) -> Any:
        """Yield the pieces of each text."""
        del names
        self.prompts, self.options = list(prompts), options
        for prompt in range(len(prompts)):
            for sequence in range(n):
                for piece in self._pieces:
                    yield Piece(prompt, sequence, piece)
                yield Piece(prompt, sequence, "", self._reason)

    async def tokenize(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return a token for each letter, after one that begins a prompt of special tokens."""
        return [*([0] if add_special_tokens is not False else ()), *map(ord, text)]


class PatientClient:
    """A request whose client stays."""

    state = SimpleNamespace(tenant="")

    async def is_disconnected(self) -> bool:
        """Return False."""
        return False


def chat(
    template: str,
    text: str,
    *,
    letters: int = 3,
    settings: dict[str, Any] | None = None,
    **body: Any,
) -> tuple[WritingTriton, Any]:
    """Return the Triton that was asked, and the answer to a chat about which it writes ``text``:
    the whole, or the events of a stream.
    """
    reason = body.pop("reason", "end_id")
    triton = WritingTriton(text, letters, reason)
    front_end = FrontEnd("", ("m",), ChatTemplate(template), **(settings or {}))
    data = json.dumps({"model": "m", "messages": HI, **body}).encode()

    async def ask() -> Any:
        answer = chat_of(front_end, data, HEADERS)
        response: Any = await answer.response(PatientClient(), triton)  # type: ignore[arg-type]
        if not body.get("stream"):
            return json.loads(response.body)
        events = [str(event) async for event in response.body_iterator]
        assert events.pop() == "data: [DONE]\n\n"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return triton, asyncio.run(ask())


def message_of(answer: Any) -> dict[str, Any]:
    """Return the message of an answer, put together as clients do where it was streamed."""
    if isinstance(answer, dict):
        choice = answer["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    message: dict[str, Any] = {"role": None, "content": "", "finish_reason": None}
    calls: dict[int, dict[str, Any]] = {}
    for choice in (event["choices"][0] for event in answer):
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            assert call["index"] not in calls, "a call comes as one event"
            calls[call["index"]] = {name: call[name] for name in call if name != "index"}
        message["finish_reason"] = choice["finish_reason"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
