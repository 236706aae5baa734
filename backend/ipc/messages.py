"""Messages between Triton's stubs and the engine process, as bytes on a socket: a length of 4
bytes, big-endian, then MessagePack.

The first message of either side is ``Hello`` with the protocol's version. ``id`` is chosen by the
stub, unique in its connection. Every ``Submit`` is answered by exactly one ``Final`` or
``ErrorReply``, after the ``Chunk``s of a streaming request; every ``Admin``, ``Encode`` and
``Decode`` by one ``AdminReply``, ``EncodeReply``, ``DecodeReply`` or ``ErrorReply``; a sender of
``Subscribe`` gets ``StatsUpdate``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from backend.ops.metric_names import Labelled
from backend.request import ErrorCode, FinishReason, GenerationRequest

VERSION = 3
SWITCHES_SUFFIX = ".switches"
"""Suffix of the file next to the socket in which switches set live outlast an engine process; a
server that starts removes it.
"""


class IpcMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Any of them; ``id`` is 0 where it is of no request."""

    id: int = 0


class Hello(IpcMessage, frozen=True, kw_only=True, tag=True):
    """A greeting; the engine process tells what it serves in ``info``."""

    version: int = VERSION
    info: dict[str, Any] = {}


# Messages from a stub.


class Submit(IpcMessage, frozen=True, kw_only=True, tag=True):
    """A request; ``trace`` is the context of one that Triton traces (``traceparent`` and, if there
    is one, ``tracestate``).
    """

    request: GenerationRequest
    trace: dict[str, str] | None = None


class Cancel(IpcMessage, frozen=True, kw_only=True, tag=True):
    """The client of a request has gone."""


class Admin(IpcMessage, frozen=True, kw_only=True, tag=True):
    """A command of the administrative interface."""

    command: str


class Subscribe(IpcMessage, frozen=True, kw_only=True, tag=True):
    """Metrics are wanted, twice a second."""


class Encode(IpcMessage, frozen=True, kw_only=True, tag=True):
    """Texts whose token ids are wanted, and whether each gets special tokens (None: as the
    deployment says); words get none.
    """

    prompts: list[str]
    add_special_tokens: list[bool | None]
    words: list[str]


class Decode(IpcMessage, frozen=True, kw_only=True, tag=True):
    """Lists of token ids whose texts are wanted."""

    tokens: list[list[int]]


# Messages from the engine process.


class PromptScores(msgspec.Struct, frozen=True):
    """The ``tokens`` of a prompt as bytes, and of all but the first its log-probability and the
    likeliest there.
    """

    tokens: list[bytes]
    log_probs: list[float]
    top: list[list[tuple[bytes, float]]]


class Chunk(IpcMessage, frozen=True, kw_only=True, tag=True):
    """Output of a request since its last message; all but ``text`` only where asked for.

    ``log_probs`` by token and ``cum_log_prob`` of all so far; ``token_bytes`` and the likeliest at
    each place, ``top``; ``context_logits`` and ``generation_logits`` name .npy files, which the
    reader removes when it puts the arrays in their place.
    """

    text: str = ""
    tokens: list[int] | None = None
    log_probs: list[float] | None = None
    cum_log_prob: float = 0.0
    token_bytes: list[bytes] | None = None
    top: list[list[tuple[bytes, float]]] | None = None
    prompt: PromptScores | None = None
    context_logits: Any = None
    generation_logits: Any = None


class Final(Chunk, frozen=True, kw_only=True, tag=True):
    """A request's end: ``text`` is the last delta of a streaming one, the whole text of another.

    ``seed`` is None for greedy. ``drafts`` are (name, proposed, accepted) tokens; ``times_s`` when
    it arrived, was first admitted, and got its first and its last token; ``kv_blocks`` the new and
    the reused ones; ``verified_steps`` and ``k_max`` as in ``Usage``.
    """

    finish_reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    seed: int | None = None
    drafts: list[tuple[str, int, int]] = []
    times_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    kv_blocks: tuple[int, int] = (0, 0)
    verified_steps: list[tuple[int, int]] = []
    k_max: int = 0


class ErrorReply(IpcMessage, frozen=True, kw_only=True, tag=True):
    """A request or command that came to nothing."""

    code: ErrorCode
    message: str


class AdminReply(IpcMessage, frozen=True, kw_only=True, tag=True):
    """The answer to a command."""

    reply: dict[str, Any]


class StatsUpdate(IpcMessage, frozen=True, kw_only=True, tag=True):
    """Counters' increments, new observations and gauges since the last of them."""

    counters: list[Labelled] = []
    observations: list[Labelled] = []
    gauges: list[Labelled] = []


class EncodeReply(IpcMessage, frozen=True, kw_only=True, tag=True):
    """The token ids of texts and words, in order."""

    prompts: list[list[int]]
    words: list[list[int]]
    end_id: int
    vocab_size: int


class DecodeReply(IpcMessage, frozen=True, kw_only=True, tag=True):
    """The texts of token ids, in order."""

    texts: list[str]


FromStub = Hello | Submit | Cancel | Admin | Subscribe | Encode | Decode
FromEngine = (
    Hello | Chunk | Final | ErrorReply | AdminReply | StatsUpdate | EncodeReply | DecodeReply
)


class ProtocolVersionError(Exception):
    """A peer of another version, or one that does not greet."""


def check_hello(message: Any) -> Hello:
    """Return a peer's greeting; raises ProtocolVersionError unless it is one of this version."""
    if not isinstance(message, Hello):
        raise ProtocolVersionError(f"expected a hello, got {type(message).__name__}")
    if message.version != VERSION:
        raise ProtocolVersionError(
            f"peer speaks protocol version {message.version}, this side {VERSION}"
        )
    return message


MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=IpcMessage)


class FrameError(Exception):
    """Bytes that are no frame: too long, or no message of the protocol."""


def frame(message: IpcMessage) -> bytes:
    """Return a message's bytes. Raises UnicodeEncodeError for text with a lone surrogate."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[M]):
    """Cuts a byte stream into the messages of ``kinds``; feed it what the socket gave."""

    def __init__(self, kinds: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages completed by ``data``. Raises FrameError."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield self._message(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]

    def _message(self, body: bytes) -> M:
        try:
            message: M = self._decode(body)
        except msgspec.DecodeError as error:
            raise FrameError(f"frame is not a message: {error}") from error
        return message
