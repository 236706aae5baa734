"""What an answer's pieces look like as OpenAI's choices: text, chat messages, log-probabilities,
tool calls.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from backend.openai_frontend.calls import Call, CallFormat, CallReader
from backend.openai_frontend.places import Places, by_text, token_text
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
    """What a body asks of the choices.

    ``tool``: the text is the arguments of this function, or ('') a call that names its own.
    ``calls``: the text may have calls of the functions ``names`` in this format, of which only the
    first counts unless ``parallel``. ``echo``: the prompt is part of the text; ``silent``: nothing
    else is. ``special``: the names of special tokens.
    """

    kind: Kind
    log_probs: bool = False
    tool: str | None = None
    calls: CallFormat | None = None
    names: tuple[str, ...] = ()
    parallel: bool = True
    echo: bool = False
    silent: bool = False
    special: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class Choice:
    """One of the texts of an answer, as far as it has come. ``text`` begins as what is echoed of
    the prompt.
    """

    style: Style
    index: int
    text: str = ""
    reason: str | None = None
    seed: int | None = None
    tokens: list[Token] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)
    _begun: bool = False
    _calls: int = 0
    _reader: CallReader | None = None
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        self._places = Places(self.text, self.style.special)
        if self.style.calls is not None:
            self._reader = CallReader(self.style.calls, self.style.names)

    def add(self, piece: Piece) -> None:
        """Take what is new."""
        if piece.prompt_tokens:
            self.tokens += piece.prompt_tokens
            self._offsets += self._places.of_prompt(token.data for token in piece.prompt_tokens)
        if not self.style.silent:
            self.text += piece.text
            self.seed = piece.seed
            tokens = self._listed(piece)
            self.tokens += tokens
            self._offsets += self._places.of_output(token.data for token in tokens)
        if piece.finish_reason is not None:
            self.reason = (
                "length" if piece.finish_reason == "length" or self.style.silent else "stop"
            )

    def _listed(self, piece: Piece) -> list[Token]:
        """Return the tokens of the text. With the prompt before it all count: evaluation harnesses
        take the last one away.
        """
        if self.style.echo:
            return piece.tokens
        tokens = piece.tokens[:-1] if piece.finish_reason == "end_id" else piece.tokens
        return [token for token in tokens if token.data not in self.style.special]

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        if self.style.kind == COMPLETION:
            return self._completion()
        content, calls = self._read()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._chat_log_probs(),
            **self._ending(),
        }

    def part(self) -> dict[str, Any] | None:
        """Return what is new as the choice of an event, and forget it; None while it may be part of
        a call.
        """
        if self.style.kind == COMPLETION:
            made = self._completion()
        else:
            content, calls = self._read()
            held = self.style.tool is not None or self._reader is not None
            if held and self.reason is None and not content and not calls:
                return None
            delta: dict[str, Any] = {} if self._begun else {"role": "assistant"}
            if content or not calls:
                delta["content"] = content
            if calls:
                first = self._calls - len(calls)
                delta["tool_calls"] = [
                    {"index": first + at, **call} for at, call in enumerate(calls)
                ]
            made = {
                "index": self.index,
                "delta": delta,
                "logprobs": self._chat_log_probs(),
                **self._ending(),
            }
        self.tokens, self._offsets, self._begun = [], [], True
        return made

    def _completion(self) -> dict[str, Any]:
        text, self.text = self.text, ""
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._text_log_probs(),
            **self._ending(),
        }

    def _ending(self) -> dict[str, Any]:
        """Return how the text ended, if it has, and the seed that it was drawn with, if any."""
        called = self._calls and self.reason == "stop"
        ending = {"finish_reason": "tool_calls" if called else self.reason}
        return ending if self.seed is None else {**ending, "seed": self.seed}

    def _read(self) -> tuple[str, list[dict[str, Any]]]:
        """Return (and forget) the content and the calls that are certain."""
        ended, calls = self.reason is not None, list[Call]()
        if self.style.tool is not None and not ended:
            return "", []
        content, self.text = self.text, ""
        if self.style.tool is not None:
            if (call := _forced_call(self.style.tool, content)) is not None:
                content, calls = "", [call]
        elif self._reader is not None:
            content, calls = self._reader.read(content, ended=ended)
            if not self.style.parallel:
                calls = calls[: 1 - self._calls]
        self._calls += len(calls)
        return content, [_told_call(call) for call in calls]

    def _chat_log_probs(self) -> dict[str, Any] | None:
        if not self.style.log_probs:
            return None
        content = [
            {
                **_told(token.data, token.log_prob),
                "top_logprobs": [_told(*best) for best in token.top],
            }
            for token in self.tokens
        ]
        return {"content": content, "refusal": None}

    def _text_log_probs(self) -> dict[str, Any] | None:
        """Return the older form; an offset is that of the character that a token begins in."""
        if not self.style.log_probs:
            return None
        return {
            "tokens": [token_text(token.data) for token in self.tokens],
            "token_logprobs": [token.log_prob for token in self.tokens],
            "top_logprobs": [
                None if token.log_prob is None else by_text(token.top) for token in self.tokens
            ],
            "text_offset": self._offsets,
        }


def _forced_call(name: str, text: str) -> Call | None:
    """Return a text that a grammar has held as a call; None where it names no function, as one that
    was cut may.
    """
    if name:
        return Call(name, text)
    try:
        call = json.loads(text)
        return Call(call["name"], json.dumps(call["parameters"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        return None


def _told_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _told(data: bytes, log_prob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": log_prob, "bytes": list(data)}
