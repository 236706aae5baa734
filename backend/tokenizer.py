"""Text to token ids and back, one token at a time: the ``tokenizers`` library encodes, a table of
bytes per token decodes.

The table makes the streamed text independent of how the tokens were cut into steps: a token is a
few bytes, and text is what those bytes are in UTF-8. It equals the library's own ``decode`` of the
whole list, special tokens skipped, with one exception: where a byte-fallback tokenizer emits bytes
that are not UTF-8, the library writes one U+FFFD per byte of the run, we one per malformed
sequence.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backend.checked_settings import ConfigError
from backend.files import read_object
from backend.request import ErrorCode, RequestError
from backend.special_tokens import end_ids, special_in

BYTE_VALUES = 256
_BYTE_TOKEN_LENGTH = len("<0x00>")
_SPACE_MARK = "▁"


class TokenizerError(ConfigError):
    """A tokenizer that cannot be used; the message names the file or folder."""


class Tokenizer(Protocol):
    """The methods of a tokenizer that the server needs. ``token_bytes[id]`` is empty for special
    tokens; ``end_ids`` end a generation.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def token_bytes(self) -> Seq[bytes]:
        """The bytes of every token, by id."""
        ...

    @property
    def end_id(self) -> int:
        """The token that the tokenizer itself ends a text by."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by what they are called: they are no text of the output."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it has a lone surrogate."""
        ...


class IncrementalDecoder:
    """Turns token ids into text, one at a time; bytes of an incomplete character are held back
    until they make one.

    ``strip_space`` drops one leading space, as Llama 2's decoder does at the start of a text
    (``FolderTokenizer.strips_space``); the continuation of a prompt keeps it. Ids beyond the table
    (a model's padded vocabulary) are no text.
    """

    def __init__(self, token_bytes: Seq[bytes], *, strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._incomplete = b""
        self._strip_space = strip_space

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often empty."""
        table = self._token_bytes
        return self._text(table[token_id] if token_id < len(table) else b"", final=False)

    def finish(self) -> str:
        """Return U+FFFD for the bytes still held back, else nothing."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, *, final: bool) -> str:
        data = self._incomplete + data
        text, read = codecs.utf_8_decode(data, "replace", final)
        self._incomplete = data[read:]
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Bytes as tokens and one end token: the tokenizer of the fake engine and of tests."""

    vocab_size: int = BYTE_VALUES + 1
    token_bytes: tuple[bytes, ...] = (*(bytes([value]) for value in range(BYTE_VALUES)), b"")
    end_id: int = BYTE_VALUES
    end_ids: frozenset[int] = frozenset({BYTE_VALUES})
    special_tokens: Mapping[str, int] = field(default_factory=lambda: {"<|end|>": BYTE_VALUES})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the UTF-8 bytes of a text; there are no special tokens to add."""
        del add_special_tokens
        return list(_utf8(text))


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """The tokenizer of a Hugging Face checkpoint folder. ``strips_space``: its decoder drops one
    space at the start of a text.
    """

    token_bytes: tuple[bytes, ...]
    end_id: int
    end_ids: frozenset[int]
    strips_space: bool
    special_tokens: Mapping[str, int]
    _library: Any

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer knows; a model's vocabulary may be padded beyond
        it.
        """
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it has a lone surrogate.

        ``encode_batch_fast`` releases Python's lock while it works; ``encode`` holds it, 3 s for
        1 MB of digits, and nothing else in the process runs.
        """
        _utf8(text)
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def load_tokenizer(folder: Path) -> FolderTokenizer:
    """Load ``tokenizer.json`` and the end-of-text ids of a checkpoint folder. Raises TokenizerError
    or ConfigError naming what cannot be used.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    spec = read_object(path)
    try:
        library = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise TokenizerError(f"cannot load {path}: {error}") from error
    library.no_truncation()
    library.no_padding()
    vocabulary = library.get_vocab(with_added_tokens=True)
    try:
        table, strips_space = _token_bytes(vocabulary, spec)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    ends = end_ids(folder, vocabulary)
    special = special_in(spec)
    return FolderTokenizer(table, ends[0], frozenset(ends), strips_space, special, library)


def named_token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Return the bytes of every token by id, those of special tokens being their names."""
    table = list(tokenizer.token_bytes)
    for name, token in tokenizer.special_tokens.items():
        table[token] = name.encode()
    return tuple(table)


def _token_bytes(
    vocabulary: dict[str, int], spec: dict[str, Any]
) -> tuple[tuple[bytes, ...], bool]:
    """Return the bytes of every token and whether the decoder drops a leading space, as
    ``spec['decoder']`` says.
    """
    decoder = spec.get("decoder") or {}
    kind = decoder.get("type")
    if kind == "ByteLevel":
        to_bytes, strips_space = _byte_level, False
    elif kind == "Sequence" and (steps := _metaspace_steps(decoder)) is not None:
        to_bytes, strips_space = _metaspace, "Strip" in steps
    else:
        raise TokenizerError(
            f"decoder {json.dumps(decoder, ensure_ascii=False)} is not supported; known: "
            f"ByteLevel, Llama 2's Sequence"
        )
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    for added in spec.get("added_tokens", ()):
        if added["special"]:
            table[added["id"]] = b""
    return tuple(table), strips_space


def _metaspace_steps(decoder: dict[str, Any]) -> list[str] | None:
    """Return the step names of Llama 2's decoder (mark to space, byte fallback, fuse, perhaps strip
    one leading space), else None.
    """
    replace = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = decoder["decoders"]
    if steps in (
        [replace, {"type": "ByteFallback"}, {"type": "Fuse"}],
        [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
    ):
        return [step["type"] for step in steps]
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: a printable byte stands for itself, the others for the
    characters from U+0100 on.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [value for value in range(BYTE_VALUES) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(BYTE_VALUES + i): value for i, value in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    """Return a token's bytes; one with a character outside the alphabet (an added token) is its own
    UTF-8, as in the library.
    """
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _metaspace(token: str) -> bytes:
    if len(token) == _BYTE_TOKEN_LENGTH and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # an ordinary token of that shape
    return token.replace(_SPACE_MARK, " ").encode("utf-8")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"text has a lone surrogate {text[error.start]!r} at character {error.start}"
        raise RequestError(ErrorCode.INVALID_ARGUMENT, message) from None
