"""What an answer's pieces look like as OpenAI's choices: text, chat messages, log-probabilities, tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backend.openai_frontend.triton import Piece, Token


@dataclass(frozen=True, slots=True)
class Kind:
    """How the bodies of one route look."""

    prefix: str
    whole: str
    part: str


COMPLETION = Kind("cmpl", "text_completion", "text_completion")
CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk")


@dataclass(frozen=True, slots=True)
class Style:
    """What a body asks of the choices. ``tool``: the text is the arguments of this function, or ('') a call that names its own."""

    kind: Kind
    log_probs: bool = False
    tool: str | None = None


@dataclass(slots=True)
class Choice:
    """One of the texts of an answer, as far as it has come."""

    style: Style
    index: int
    text: str = ""
    reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    _begun: bool = False
    _offset: int = 0

    def add(self, piece: Piece) -> None:
        """Take what is new."""
        self.text += piece.text
        self.reason = finish_reason(piece)
        self.tokens += piece.tokens

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        call = self._call() if self.style.tool is not None else None
        if self.style.kind is COMPLETION:
            return self._completion(self.text)
        message = (
            {"role": "assistant", "content": self.text} if call is None else {"role": "assistant", "content": None, "tool_calls": [call]}
        )
        return {"index": self.index, "message": message, "logprobs": self._chat_log_probs(), "finish_reason": self._reason(call)}

    def part(self) -> dict[str, Any] | None:
        """Return what is new as the choice of an event, and forget it; None while a tool call is not complete."""
        if self.style.tool is not None and self.reason is None:
            return None
        call = self._call() if self.style.tool is not None else None
        text, self.text = self.text, ""
        if self.style.kind is COMPLETION:
            made = self._completion(text)
        else:
            role: dict[str, Any] = {} if self._begun else {"role": "assistant"}
            delta = role | ({"content": text} if call is None else {"tool_calls": [{"index": 0, **call}]})
            made = {"index": self.index, "delta": delta, "logprobs": self._chat_log_probs(), "finish_reason": self._reason(call)}
        self.tokens, self._begun = [], True
        return made

    def _completion(self, text: str) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": self._text_log_probs(), "finish_reason": self.reason}

    def _reason(self, call: dict[str, Any] | None) -> str | None:
        return "tool_calls" if call is not None and self.reason == "stop" else self.reason

    def _call(self) -> dict[str, Any] | None:
        """Return the text as a tool call; None where it names no function, as one that was cut may."""
        name, arguments = self.style.tool, self.text
        if not name:
            try:
                call = json.loads(self.text)
                name, arguments = call["name"], json.dumps(call["parameters"], ensure_ascii=False)
            except (ValueError, KeyError, TypeError):
                return None
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def _chat_log_probs(self) -> dict[str, Any] | None:
        if not self.style.log_probs:
            return None
        content = [{**_told(token.data, token.log_prob), "top_logprobs": [_told(*best) for best in token.top]} for token in self.tokens]
        return {"content": content, "refusal": None}

    def _text_log_probs(self) -> dict[str, Any] | None:
        """Return the older form, whose offsets count characters of the text."""
        if not self.style.log_probs:
            return None
        texts, offsets = [_text(token.data) for token in self.tokens], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.log_prob for token in self.tokens],
            "top_logprobs": [{_text(data): log_prob for data, log_prob in token.top} for token in self.tokens],
            "text_offset": offsets,
        }


def finish_reason(piece: Piece) -> str | None:
    """Return OpenAI's word for how a text ended."""
    return None if piece.finish_reason is None else "length" if piece.finish_reason == "length" else "stop"


def tool_schema(tools: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call that names one of the functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "parameters": tool.get("parameters") or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _told(data: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": log_prob, "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
