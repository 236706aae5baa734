"""Request sizes that are refused before anything is tokenised, by the stubs and by the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from backend.request import ErrorCode, GenerationRequest, RequestError

MOST_TEXT_BYTES = 32 * 1024 * 1024
"""Bytes of one text, whatever the context: half a frame of the socket."""
BYTES_PER_TOKEN = 16
"""Bytes of a text for each token of the context; English has 4 to 5 a token."""
LEAST_TEXT_BYTES = 64 * 1024
"""Bytes that a text may have in any context: tokenising that many digits takes about 0.2 s."""
MOST_STOP_WORDS = 256
"""Stop words, or stop tokens, of a request: each is searched for after every token."""
MOST_WORD_LENGTH = 1024
"""Characters, or token ids, of one word."""
MOST_WORDS_LENGTH = 64 * 1024
"""Characters, or token ids, of a list of words."""
MOST_GUIDE_CHARACTERS = 256 * 1024
MOST_SALT_CHARACTERS = 1024
MOST_ELEMENTS = 2 * 1024 * 1024
"""Elements of one tensor of a request: a context of a million tokens, padded."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Sizes that follow from the served model: the most tokens of a prompt."""

    prompt_tokens: float = float("inf")

    @staticmethod
    def from_info(info: dict[str, Any]) -> PromptLimits:
        """Return the limits that an engine's hello has; no limits where there was no hello yet."""
        return PromptLimits(info.get("max_context_tokens", math.inf) - 1)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError for a request whose prompt cannot fit into the context."""
        self.check_text("text_input", request.text_input)
        for name, ids in (
            ("input_ids", request.input_ids or ()),
            ("prompt_token_ids", request.prompt_token_ids),
        ):
            if len(ids) > self.prompt_tokens:
                raise _over(f"{name} of {len(ids)} tokens", f"{self.prompt_tokens}")

    def check_text(self, name: str, text: str) -> None:
        """Raise RequestError for a text with too many bytes for the context."""
        size = byte_size(text)
        if size > MOST_TEXT_BYTES:
            raise _over(f"{name} of {size} bytes", f"{MOST_TEXT_BYTES} bytes")
        if size > max(LEAST_TEXT_BYTES, BYTES_PER_TOKEN * self.prompt_tokens):
            raise _over(f"{name} of {size} bytes", f"{self.prompt_tokens} tokens")


def check_words(name: str, words: Iterable[Sized]) -> None:
    """Raise RequestError for a list of words that is too long, or has a word that is."""
    lengths = [len(word) for word in words]
    if sum(lengths) > MOST_WORDS_LENGTH:
        raise _over(f"{name} with {sum(lengths)} characters or ids", f"{MOST_WORDS_LENGTH}")
    if (longest := max(lengths, default=0)) > MOST_WORD_LENGTH:
        raise _over(f"{name} with a word of {longest} characters or ids", f"{MOST_WORD_LENGTH}")


def check_stop_words(name: str, words: Sequence[Sized]) -> None:
    """Raise RequestError for a list of stop words that is too long, or has a word that is."""
    check_words(name, words)
    if len(words) > MOST_STOP_WORDS:
        raise _over(f"{name} of {len(words)} words", f"{MOST_STOP_WORDS}")


def check_sizes(request: GenerationRequest) -> None:
    """Raise RequestError for an option whose size is over its limit, whatever the model."""
    check_stop_words("stop_words", request.stop_words)
    check_stop_words("stop_words_list", request.stop_word_ids)
    check_words("bad_words", request.bad_words)
    check_words("embedding_bias_words", request.embedding_bias_words)
    check_words("bad_words_list", request.bad_word_ids)
    if len(request.stop_token_ids) > MOST_STOP_WORDS:
        raise _over(f"stop_token_ids of {len(request.stop_token_ids)} ids", f"{MOST_STOP_WORDS}")
    for name, text, most in (
        ("cache_salt", request.cache_salt or "", MOST_SALT_CHARACTERS),
        ("guided_decoding_guide", request.guide or "", MOST_GUIDE_CHARACTERS),
    ):
        if len(text) > most:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} must have at most {most} characters, got {len(text)}",
            )


def byte_size(text: str) -> int:
    """Return the size of a text in UTF-8, lone surrogates counted as three bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _over(size: str, limit: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{size} is over the limit of {limit}")
