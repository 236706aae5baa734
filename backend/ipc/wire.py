"""The wire between Triton's stubs and the engine process: framed, versioned JSON messages over a
Unix socket.

A frame is a 4-byte big-endian length, then a UTF-8 JSON object ``{"type": ..., ...}``. The first
frame of either side is ``hello`` with the protocol version; a mismatch closes the connection with
an error that names both versions.

stub -> engine   hello{version}  submit{id, request, trace}  cancel{id}  admin{id, command}
                 subscribe{}  encode{id, prompts, words}  decode{id, tokens}
engine -> stub   hello{version, info}  chunk{id, text, tokens}
                 final{id, text, tokens, finish_reason, seed, num_input_tokens, num_output_tokens,
                 draft_tokens, accepted_draft_tokens, drafts, times_s, kv_blocks}
                 error{id, code, message}  admin{id, reply}  stats{counters, observations, gauges}
                 encoded{id, prompts, words, end_id, vocab_size}  decoded{id, texts}

``id`` is chosen by the stub, unique in its connection. Every ``submit`` is answered by exactly one
``final`` or ``error``, every ``admin`` by one ``admin`` or ``error``; the ``chunk``s of a streaming
request come before it. ``trace`` comes with a request that Triton traces (its context:
``traceparent`` and, if there is one, ``tracestate``). ``final.text`` is the last delta of a
streaming request, the whole text of another; ``final.seed`` is null for greedy. ``bytes`` and
``top`` (tokens as Latin-1 text), ``context_logits`` and ``generation_logits`` (names of .npy files,
which the stub removes) and ``prompt`` (``bytes`` of its tokens, ``log_probs`` and ``top`` of all
but the first) come where they were asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

VERSION = 1
SWITCHES_SUFFIX = ".switches"
"""Of the file beside the socket in which switches set live outlast an engine process; a server that
starts removes it.
"""
MAX_FRAME_BYTES = 64 * 1024 * 1024

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")


class WireError(Exception):
    """A peer that does not speak this protocol: bad length, bad JSON or another version."""


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into messages; feed it what the socket gave."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages completed by ``data``. Raises WireError on an oversized or malformed
        frame.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield _parse(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise WireError(f"frame is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("frame is not an object with a type")
    return message


def hello(**info: Any) -> Message:
    """Return this side's greeting."""
    return {"type": "hello", "version": VERSION, **info}


def check_hello(message: Message) -> Message:
    """Return a peer's greeting; raises WireError unless it is one of this version."""
    if message.get("type") != "hello":
        raise WireError(f"expected hello, got {message.get('type')!r}")
    if message.get("version") != VERSION:
        raise WireError(
            f"peer speaks protocol version {message.get('version')!r}, this side {VERSION}"
        )
    return message
