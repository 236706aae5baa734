"""KV events in vLLM's wire format (ZeroMQ PUB, msgpack), which Dynamo, vllm-router and llm-d read:
which complete blocks can be found here, so that routers send a prompt to where its KV is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import zmq

from backend.sequence import BLOCK_TOKENS

_NAME_BYTES = 8
_MEDIUM = "GPU"  # readers know this, "CPU" and disks as tiers: it is the one that is attended to


class KVEvents:
    """Publishes blocks that become known, and those that are forgotten."""

    def __init__(self, endpoint: str) -> None:
        """Bind to an endpoint. Raises ValueError where that is not possible."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"KV_EVENTS {endpoint} cannot be bound: {error}") from None
        self._number = 0
        self._published: set[bytes] = set()
        self._encoder = msgspec.msgpack.Encoder()

    def add_block(self, key: bytes, parent: bytes | None, tokens: Seq[int]) -> None:
        """Publish a block, named by its key, after the block ``parent`` (None: the first)."""
        self._published.add(key)
        self._send(
            {
                "type": "BlockStored",
                "block_hashes": [_name(key)],
                "parent_block_hash": None if parent is None else _name(parent),
                "token_ids": list(tokens),
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
            }
        )

    def remove_block(self, key: bytes) -> None:
        """Publish that a block was forgotten, if it was published."""
        if key in self._published:
            self._published.remove(key)
            self._send({"type": "BlockRemoved", "block_hashes": [_name(key)], "medium": _MEDIUM})

    def close(self) -> None:
        """Free the endpoint."""
        self._socket.close()

    def _send(self, event: dict[str, Any]) -> None:
        batch = self._encoder.encode([time.time(), [event], 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._socket.send_multipart([b"", number, batch])


def _name(key: bytes) -> int:
    return int.from_bytes(key[:_NAME_BYTES], "big")
