"""An answer's pieces as OpenAI's choices: text, chat messages, log-probabilities,
tool calls.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from backend.openai_frontend.call_bodies import Call, Functions
from backend.openai_frontend.calls import CallFormat, CallReader, Parts
from backend.openai_frontend.reading import (
    CHANNEL,
    MESSAGE,
    ChannelReader,
    Channels,
    ForcedCallReader,
    Frame,
    Reader,
)
from backend.openai_frontend.triton import Piece, Token


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """How the bodies of one route look."""

    prefix: str
    whole: str
    part: str


COMPLETION = AnswerKind("cmpl", "text_completion", "text_completion")
CHAT = AnswerKind("chatcmpl", "chat.completion", "chat.completion.chunk")


@dataclass(frozen=True, slots=True)
class Style:
    """A body's options for the choices."""

    kind: AnswerKind
    log_probs: bool = False
    tool: str | None = None
    """The text is the arguments of this function, or ('') a call that names its own."""
    calls: CallFormat | None = None
    """The text may have calls in this format."""
    functions: Functions = field(default_factory=dict)
    """The functions that may be called."""
    parallel: bool = True
    """False: only the first call counts."""
    frame: Frame | None = None
    """Text around the content."""
    shows_reasoning: bool = True
    """Whether the client gets the reasoning."""
    echo: bool = False
    """The prompt is part of the text."""
    silent: bool = False
    """Nothing else than the prompt is part of the text."""
    special: frozenset[bytes] = frozenset()
    """The names of special tokens."""

    @property
    def marks(self) -> set[str]:
        """The marks that a text is read by, and is not without them."""
        marks = set[str]()
        if isinstance(self.frame, Channels):
            marks |= {CHANNEL, MESSAGE}
        elif self.frame is not None:
            marks |= {self.frame.form.opening, self.frame.form.closing}
        if self.calls is not None:
            marks |= {*self.calls.openings, *self.calls.closings}
        return marks

    def reader(self) -> Reader | ChannelReader | None:
        """Return what reads a text; None where all of it is content."""
        if isinstance(self.frame, Channels):
            return ChannelReader(self.functions, splits=self.frame.splits)
        answer: CallReader | ForcedCallReader | None = None
        if self.tool is not None:
            answer = ForcedCallReader(self.tool)
        elif self.calls is not None:
            answer = CallReader(self.calls, self.functions)
        return Reader(self.frame, answer) if self.frame or answer else None


@dataclass(slots=True)
class TextChoice:
    """One of the texts of an answer, as far as it has come. ``text`` begins as what is echoed of
    the prompt.
    """

    style: Style
    index: int
    text: str = ""
    reasoning: list[str] = field(default_factory=list)
    """All reasoning so far, in pieces, also where the client does not get it."""
    reason: str | None = None
    seed: int | None = None
    tokens: list[Token] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)
    _has_begun: bool = False
    _calls: int = 0
    _reader: Reader | ChannelReader | None = field(init=False)
    _places: TextOffsets = field(init=False)

    def __post_init__(self) -> None:
        self._places = TextOffsets(self.text, self.style.special)
        self._reader = self.style.reader()

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is apart from the content."""
        return self.style.frame is not None and self.style.frame.splits

    def add(self, piece: Piece) -> None:
        """Take what is new."""
        if piece.prompt_tokens:
            self.tokens += piece.prompt_tokens
            self._offsets += self._places.of_prompt(token.data for token in piece.prompt_tokens)
        if not self.style.silent:
            self.text += piece.text
            self.seed = piece.seed
            tokens = self._list_tokens(piece)
            self.tokens += tokens
            self._offsets += self._places.of_output(token.data for token in tokens)
        if piece.finish_reason is not None:
            self.reason = (
                "length" if piece.finish_reason == "length" or self.style.silent else "stop"
            )

    def _list_tokens(self, piece: Piece) -> list[Token]:
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
        parts = self._read()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parts.content if parts.content or not parts.calls else None,
        }
        if self.splits_reasoning and self.style.shows_reasoning:
            message |= _reasoning(parts.reasoning or None)
        if parts.calls:
            message["tool_calls"] = self._calls_of(parts)
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._chat_log_probs(),
            **self._ending(),
        }

    def part(self) -> dict[str, Any] | None:
        """Return what is new as the choice of an event, and forget it; None while all of it waits
        in the reader.
        """
        if self.style.kind == COMPLETION:
            body = self._completion()
        else:
            parts = self._read()
            if self._reader is not None and self.reason is None and not parts:
                return None
            delta: dict[str, Any] = {} if self._has_begun else {"role": "assistant"}
            if parts.reasoning:
                delta |= _reasoning(parts.reasoning)
            if parts.content or not (parts.calls or parts.reasoning):
                delta["content"] = parts.content
            if parts.calls:
                first = self._calls
                calls = self._calls_of(parts)
                delta["tool_calls"] = [
                    {"index": first + at, **call} for at, call in enumerate(calls)
                ]
            body = {
                "index": self.index,
                "delta": delta,
                "logprobs": self._chat_log_probs(),
                **self._ending(),
            }
        self.tokens, self._offsets, self._has_begun = [], [], True
        return body

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

    def _read(self) -> Parts:
        """Return (and forget) what is certain."""
        text, self.text = self.text, ""
        if self._reader is None:
            return Parts(content=text)
        parts = self._reader.read(text, ended=self.reason is not None, cut=self.reason == "length")
        self.reasoning.append(parts.reasoning)
        if not self.style.shows_reasoning:
            parts.reasoning = ""
        if not self.style.parallel:
            parts.calls = parts.calls[: 1 - self._calls]
        return parts

    def _calls_of(self, parts: Parts) -> list[dict[str, Any]]:
        self._calls += len(parts.calls)
        return [_call_as_json(call) for call in parts.calls]

    def _chat_log_probs(self) -> dict[str, Any] | None:
        if not self.style.log_probs:
            return None
        content = [
            {
                **_token_as_json(token.data, token.log_prob),
                "top_logprobs": [_token_as_json(*best) for best in token.top],
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


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Return a text under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _call_as_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _token_as_json(data: bytes, log_prob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": log_prob, "bytes": list(data)}


def token_text(data: bytes) -> str:
    r"""Return a token as OpenAI's completions write it: ``bytes:\xf0\x9f`` for a part of a
    character.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _escape(data)


def by_text(tokens: Iterable[tuple[bytes, float]]) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by their texts, best first. Two tokens
    of one text, such as a letter and its byte, differ by the form of the second.
    """
    named: dict[str, float] = {}
    for data, log_prob in tokens:
        text = token_text(data)
        named.setdefault(_escape(data) if text in named else text, log_prob)
    return named


def _escape(data: bytes) -> str:
    letters = (chr(b) if 0x20 <= b < 0x7F and b != ord("\\") else f"\\x{b:02x}" for b in data)
    return "bytes:" + "".join(letters)


class TextOffsets:
    """Counts characters along the tokens of a text. ``echoed`` is the prompt as the text has it,
    ``special`` are the names of special tokens, which are no text of an output.
    """

    def __init__(self, echoed: str, special: Collection[bytes]) -> None:
        self._echoed = echoed
        self._special = special
        self._at = 0
        self._incomplete = b""

    def of_prompt(self, tokens: Iterable[bytes]) -> list[int]:
        """Return the offsets of all tokens of the prompt. The echoed text has a special token
        where the client wrote its name, none that the tokenizer added, nor the blank that some
        tokenizers put before a text.
        """
        offsets = []
        for data in tokens:
            if data in self._special:
                offsets.append(self._at)
                name = data.decode()
                self._at += len(name) if self._echoed.startswith(name, self._at) else 0
                continue
            begins = self._at == 0 and not self._incomplete
            added = begins and data.startswith(b" ") and not self._echoed.startswith(" ")
            offsets.append(self._take(data[1:] if added else data))
        self._at, self._incomplete = len(self._echoed), b""
        return [min(offset, len(self._echoed)) for offset in offsets]

    def of_output(self, tokens: Iterable[bytes]) -> list[int]:
        """Return the offsets of the next tokens."""
        return [self._take(b"" if data in self._special else data) for data in tokens]

    def _take(self, data: bytes) -> int:
        """Return the number of the character that a token begins in, and move past the token."""
        at, pending = self._at, self._incomplete
        if pending and data:
            text, read = codecs.utf_8_decode(pending + data[:1], "replace", False)
            # the token goes on with another character where it does not go on with this one
            at += len(text) == 2 or (len(text) == 1 and read == len(pending))
        text, read = codecs.utf_8_decode(pending + data, "replace", False)
        self._at += len(text)
        self._incomplete = (pending + data)[read:]
        return at
