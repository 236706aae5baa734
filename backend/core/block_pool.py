"""The blocks of a KV pool by content: who refers to which, and which complete ones wait to be used
again.

A *key* names what a complete block holds: its tokens, all tokens before them and the tenant's salt.
Two sequences with the same key share the block. A block without references stays with its
content until room is needed; the least recently used goes first.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

_KEY_BYTES = 16


class BlockObserver(Protocol):
    """Takes which complete blocks can be found."""

    def add_block(self, key: bytes, parent: bytes | None, tokens: Seq[int]) -> None:
        """Take a block that can be found from now on, after the block ``parent`` (None: first)."""
        ...

    def remove_block(self, key: bytes) -> None:
        """Take the key of a block that can be found no more, whether it was reported or not."""
        ...


def root_key(salt: str) -> bytes:
    """Return the key that the first block of a tenant's sequences is chained to."""
    return blake2b(salt.encode(), digest_size=_KEY_BYTES, person=b"kv root").digest()


def block_key(parent: bytes, tokens: Seq[int], prompt_tokens: int = -1) -> bytes:
    """Return the key of a block of ``tokens`` after the block (or root) of key ``parent``; where a
    prompt's KV differs from that of generated tokens, ``prompt_tokens`` of a block with such.

    Cryptographic, since a client that finds two texts of one key reads another tenant's KV.
    """
    content = array("q", [*tokens, prompt_tokens])
    return blake2b(parent + content.tobytes(), digest_size=_KEY_BYTES).digest()


class BlockPool:
    """Blocks 0 to ``size`` - 1. Each is *free* (no content), *referred to* by tables, or *cached*:
    idle, with the content of its key.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.evicted = 0
        self.on_forget: Callable[[bytes], None] = lambda _key: None
        self._free = list(range(size))
        self._references = [0] * size
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # in order of their last use

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without references that hold content."""
        return len(self._cached)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first of ``keys``, up to the first that no block has."""
        return list(self._matching(keys))

    def _matching(self, keys: Iterable[bytes]) -> Iterator[int]:
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                return
            yield block

    def is_cached(self, block: int) -> bool:
        """Return whether a block with content has no reference."""
        return block in self._cached

    def share(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that were found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks (at most ``available``) for new content, referred to once: free
        ones first, then the oldest cached.
        """
        cut = max(0, len(self._free) - count)
        blocks = self._free[cut:]
        del self._free[cut:]
        while len(blocks) < count:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget(block)
            self.evicted += 1
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def publish(self, key: bytes, block: int) -> bool:
        """Let a block be found by the key of what it holds; return False, nothing changed, where
        another block has the key already.
        """
        if key in self._blocks:
            return False
        self._blocks[key] = block
        self._keys[block] = key
        return True

    def drop(self, table: Seq[int], valid: int) -> None:
        """Take back the references of a table. Blocks that have none left are
        cached if they are published and among the first ``valid`` of the table.

        The last block goes first, so that a text is forgotten from its end: what is after a
        forgotten block cannot be found.
        """
        for index in range(len(table) - 1, -1, -1):
            block = table[index]
            self._references[block] -= 1
            if self._references[block]:
                continue
            if index < valid and block in self._keys:
                self._cached[block] = None
            else:
                self._forget(block)
                self._free.append(block)

    def check(self, tables: Iterable[Seq[int]]) -> None:
        """Raise RuntimeError unless each block is in these tables as often as it is referred to,
        cached under a key, or free.
        """
        references = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            if count != references[block]:
                text = f"has {count} references and is in {references[block]} tables"
                raise RuntimeError(f"KV block {block} {text}")
        states = Counter([*self._free, *self._cached, *references])
        if wrong := [block for block in range(self.size) if states[block] != 1]:
            raise RuntimeError(f"KV blocks {wrong} are not one of free, cached and referred to")
        if {block: key for key, block in self._blocks.items()} != self._keys:
            raise RuntimeError(f"{len(self._blocks)} keys of KV blocks, {len(self._keys)} blocks")
        if nameless := self._cached.keys() - self._keys.keys():
            raise RuntimeError(f"KV blocks {sorted(nameless)} are cached without a key")

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            self.on_forget(key)
