"""Messages as bytes on a socket: a length of 4 bytes, big-endian, then MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from backend.ipc.messages import Message

MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=Message)


class FrameError(Exception):
    """Bytes that are no frame: too long, or no message of the protocol."""


def frame(message: Message) -> bytes:
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
