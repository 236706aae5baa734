"""Request sizes that are refused before anything is tokenised, by the stubs and by the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from backend.request import ErrorCode, GenerationRequest, RequestError

MOST_TEXT_BYTES = 32 * 1024 * 1024
"""Bytes of one text, whatever the context: half a frame of the socket."""
UNBOUNDED_BYTES_PER_TOKEN = 64
UNBOUNDED_TEXT_BYTES = 1024 * 1024
"""Bytes of a text (at least the second) where the tokenizer has no bound."""
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
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space, which is what the ``tokenizers`` library strips."""


_CLASSES = (
    range(0x21),  # white space and control characters
    range(0x80, 0x100),  # parts of characters beyond ASCII
    b"0123456789",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\x7f",
)
_OTHERS = tuple(bytes(set(range(256)) - set(members)) for members in _CLASSES)


@dataclass(frozen=True, slots=True)
class TextBound:
    """The most bytes of a text that one token can stand for.

    A text with more bytes than a context of such tokens is refused without tokenising it.
    """

    bytes_per_token: float
    """Infinite where the tokenizer may drop text, or make one unknown token of any amount of it."""
    class_bytes_per_token: tuple[float, ...] = ()
    """The same by kind of byte (``class_sizes``), where the normaliser leaves ASCII as it is: the
    longest tokens are white space or rules, those of digits and letters much shorter.
    """
    shrinkage: float = 1.0
    """The most bytes that the normaliser makes one of, in text beyond ASCII."""
    dropped: bytes = b""
    """Byte values without a token, which the tokenizer leaves out."""
    skips_white_space: bool = False
    """There are tokens that swallow the white space next to them."""

    def fits(self, text: str, tokens: float) -> bool:
        """Return False where the text is certainly more than this number of tokens."""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) <= tokens or math.isinf(self.bytes_per_token):
            return True
        if self.dropped:
            data = data.translate(None, self.dropped)
        size, shrinkage = len(data), 1.0 if text.isascii() else self.shrinkage
        if self.skips_white_space:
            size -= sum(text.count(blank) * len(blank.encode()) for blank in _WHITE_SPACE)
        if size > tokens * self.bytes_per_token * shrinkage:
            return False
        if shrinkage > 1.0 or not self.class_bytes_per_token:
            return True
        sizes = zip(class_sizes(data), self.class_bytes_per_token, strict=True)
        checked = islice(sizes, 2 if self.skips_white_space else 0, None)
        return all(size <= tokens * most for size, most in checked)


def class_sizes(data: bytes) -> list[int]:
    """Return how many bytes of a text are white space or control characters, parts of characters
    beyond ASCII, digits, letters, punctuation.
    """
    return [len(data.translate(None, others)) for others in _OTHERS]


NO_BOUND = TextBound(math.inf)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that follow from the served model: its tokenizer's bound and the tokens of a prompt."""

    bound: TextBound = NO_BOUND
    prompt_tokens: float = float("inf")

    @staticmethod
    def from_info(info: dict[str, Any]) -> Limits:
        """Return the limits that an engine's hello has; no limits where there was no hello yet."""
        if "text_bound" not in info:
            return Limits()
        return Limits(TextBound(**info["text_bound"]), info["max_context_tokens"] - 1)

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
        """Raise RequestError for a text that cannot fit into the context."""
        size, most = byte_size(text), MOST_TEXT_BYTES
        if math.isinf(self.bound.bytes_per_token) and math.isfinite(self.prompt_tokens):
            by_context = int(UNBOUNDED_BYTES_PER_TOKEN * self.prompt_tokens)
            most = min(most, max(UNBOUNDED_TEXT_BYTES, by_context))
        if size > most:
            raise _over(f"{name} of {size} bytes", f"{most} bytes")
        if not self.bound.fits(text, self.prompt_tokens):
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


def _over(what: str, limit: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{what} is over the limit of {limit}")
