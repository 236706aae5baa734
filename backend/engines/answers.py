"""Answers of a server, by tenant: a bounded ring of tokens, in which the places after the
same last tokens are found at once.

As in a compressor's window, every place is chained to the one before it whose last n tokens have
the same hash, for a few n, and the newest place of each hash is known. Hashes only say where to
look: a place is found where the tokens themselves and the text's tenant are the same. All memory is
taken at the start.
"""

from __future__ import annotations

import io
import zipfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SIZES = (8, 4, 2)
"""The n of the n-grams that are chained, the longest first."""
LONGEST = 16
"""Longest match whose length is reported, in tokens."""
CONTEXT = 8
"""Tokens of the prompt's end that are kept in front of an answer, so that its beginning is found;
they are never read on.
"""
SHORTEST = CONTEXT + 4
"""Texts of fewer tokens are not kept: what is noted of a text would be most of their memory."""
BORDER = -1
"""After every text, and where none is."""
VISITS = 16
"""Places looked at for each n."""

_TENANT_BYTES = 16
_FACTOR = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1
_first = itemgetter(0)


class PastMatch(NamedTuple):
    """A place after the same last ``size`` tokens (at most ``LONGEST``)."""

    slot: int
    size: int


class PastText(NamedTuple):
    """An answer after the last ``context`` tokens of its prompt."""

    tenant: bytes
    tokens: list[int]
    context: int


class _AnswerSpan(NamedTuple):
    start: int
    tokens: int
    context: int


def tenant_of(salt: str) -> bytes:
    """Return what tells a tenant's texts from others'; the salt is nowhere kept."""
    return blake2b(salt.encode(), digest_size=_TENANT_BYTES, person=b"answers").digest()


class Answers:
    """At most ``capacity`` tokens, a border after each text counted; the oldest texts go first,
    whole. ``tokens`` is how many there are, ``count`` how many texts were ever kept: a place that
    was found is good until the next is.
    """

    def __init__(self, capacity: int, visits: int = VISITS) -> None:
        self.capacity = capacity
        self._visits = visits
        self.tokens = 0
        self.count = 0
        self._at = 0  # the slot that is written next
        self._texts: deque[_AnswerSpan] = deque()  # the oldest first
        self._tenants: dict[int, bytes] = {}  # by the slot that a text starts at
        self._ring, self._text = (_borders(capacity) for _ in range(2))
        self._newest, self._before = ([_borders(capacity) for _ in SIZES] for _ in range(2))

    def add(self, text: PastText) -> tuple[int, int]:
        """Keep a text; return how many tokens were kept, and forgotten for it. One that is too long
        loses its beginning, one too short is left.
        """
        most = self.capacity - 1
        tokens, context = text.tokens[-most:], max(0, text.context - len(text.tokens[:-most]))
        if len(tokens) < SHORTEST or len(tokens) == context:
            return 0, 0
        forgotten = 0
        while self.tokens + len(tokens) + 1 > self.capacity:
            forgotten += self._forget_oldest()
        start, size = self._at, len(tokens) + 1
        slots = self._slots(start, size)
        np.frombuffer(self._ring, np.int32)[slots] = [*tokens, BORDER]
        np.frombuffer(self._text, np.int32)[slots] = start
        self._tenants[start] = text.tenant
        self._texts.append(_AnswerSpan(start, size, context))
        self._at, self.tokens = (start + size) % self.capacity, self.tokens + size
        self.count += 1
        self._chain(text.tenant, tokens, context, slots)
        return size, forgotten

    def find(self, tenant: bytes, tokens: Seq[int], most: int) -> list[PastMatch]:
        """Return up to ``most`` places of the tenant's after the last tokens of a text: those with
        the longest match, the newest first.
        """
        last, root, ring = array("i", tokens[-LONGEST:]), _root(tenant), self._ring
        for size, newest, before in zip(SIZES, self._newest, self._before, strict=True):
            if size > len(last):
                continue
            ngram = last[-size:]
            places = [
                (-self._matching(slot, last, size), slot)
                for slot in self._follow_chain(newest[self._bucket(root, ngram)], before)
                if (ring[slot - size : slot] if slot >= size else self._read_wrapped(slot, size))
                == ngram
                and self._tenants.get(self._text[slot]) == tenant
            ]
            if places:
                places.sort(key=_first)  # stable: the newest first
                return [PastMatch(slot, -size) for size, slot in places[:most]]
        return []

    def reach(self, match: PastMatch, tokens: Seq[int], most: int) -> int:
        """Return how many tokens before a place that was found are a text's last ones, at most
        ``most``.
        """
        slot, size = match
        return size if size < LONGEST else self._matching(slot, array("i", tokens[-most:]), size)

    def token(self, slot: int) -> int:
        """Return the token after a place that was found."""
        return self._ring[slot]

    def read(self, slot: int, length: int) -> list[int]:
        """Return up to ``length`` tokens from a place on, to the end of its text."""
        tokens = self._ring[slot : slot + length].tolist()
        if len(tokens) < length:
            tokens += self._ring[: length - len(tokens)]
        return tokens[: tokens.index(BORDER)] if BORDER in tokens else tokens

    def pack(self) -> bytes:
        """Return all texts, for ``unpacked``: no pickle, no salts."""
        texts, file = list(self.texts()), io.BytesIO()
        np.savez(
            file,
            tokens=np.array([token for text in texts for token in text.tokens], np.int32),
            sizes=np.array([len(text.tokens) for text in texts], np.int64),
            contexts=np.array([text.context for text in texts], np.int64),
            tenants=np.frombuffer(b"".join(text.tenant for text in texts), np.uint8),
        )
        return file.getvalue()

    @staticmethod
    def unpack(content: bytes) -> list[PastText]:
        """Return the texts that were packed, the oldest first. Raises ValueError, KeyError or
        EOFError for what is none of that.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                tokens, sizes = file["tokens"], file["sizes"]
                contexts, tenants = file["contexts"], file["tenants"]
        except zipfile.BadZipFile as error:
            raise ValueError(f"it is damaged: {error}") from error
        if tokens.dtype != np.int32 or tokens.min(initial=0) < 0 or sizes.sum() != len(tokens):
            raise ValueError("its tokens are not those of its texts")
        if not len(sizes) == len(contexts) == len(tenants) / _TENANT_BYTES:
            raise ValueError(f"it has {len(sizes)} texts and {len(contexts)} contexts")
        if (sizes < 0).any() or (contexts < 0).any() or (contexts > sizes).any():
            raise ValueError("a text is shorter than its context")
        ends, whose = sizes.cumsum().tolist(), tenants.tobytes()
        names = (whose[at : at + _TENANT_BYTES] for at in range(0, len(whose), _TENANT_BYTES))
        columns = zip(names, ends, sizes.tolist(), contexts.tolist(), strict=True)
        return [
            PastText(tenant, tokens[end - size : end].tolist(), context)
            for tenant, end, size, context in columns
        ]

    def texts(self) -> Iterator[PastText]:
        """Yield all texts, the oldest first."""
        ring = np.frombuffer(self._ring, np.int32)
        for start, size, context in self._texts:
            tokens = ring[self._slots(start, size - 1)].tolist()
            yield PastText(self._tenants[start], tokens, context)

    @property
    def array_bytes(self) -> int:
        """Memory of the arrays, all of it from the start."""
        return sum(len(each) * each.itemsize for each in self._arrays())

    def check(self) -> None:
        """Raise RuntimeError unless the arrays have the size of the start, and texts that are kept
        are all that is in them.
        """
        if wrong := [len(each) for each in self._arrays() if len(each) != self.capacity]:
            raise RuntimeError(f"arrays of {wrong} slots, the capacity is {self.capacity}")
        size = sum(text.tokens for text in self._texts)
        if not size == self.tokens <= self.capacity:
            raise RuntimeError(f"texts of {size} tokens, counted {self.tokens}")
        if [text.start for text in self._texts] != list(self._tenants):
            raise RuntimeError(f"{len(self._texts)} texts, {len(self._tenants)} tenants of texts")
        owner = np.full(self.capacity, BORDER, np.int32)
        ends = np.ones(self.capacity, np.bool_)
        for start, tokens, _ in self._texts:
            owner[self._slots(start, tokens)] = start
            ends[self._slots(start, tokens - 1)] = False
        if wrong := np.flatnonzero(owner != np.frombuffer(self._text, np.int32)).tolist():
            raise RuntimeError(f"slots {wrong} are of another text")
        if wrong := np.flatnonzero(
            ends != (np.frombuffer(self._ring, np.int32) == BORDER)
        ).tolist():
            raise RuntimeError(f"slots {wrong} have a token outside the texts, or none in one")

    def _arrays(self) -> list[array[int]]:
        return [self._ring, self._text, *self._newest, *self._before]

    def _follow_chain(self, slot: int, before: array[int]) -> Iterator[int]:
        """Yield the last ``visits`` places of a chain, from its newest on."""
        at, capacity, age = self._at, self.capacity, 0
        for _ in range(self._visits):
            older = (at - slot) % capacity or capacity
            if slot < 0 or older <= age:
                return  # the end, or written over since
            age = older
            yield slot
            slot = before[slot]

    def _read_wrapped(self, slot: int, size: int) -> array[int]:
        """Return the tokens before a place near the ring's beginning."""
        return self._ring[slot - size :] + self._ring[:slot]

    def _matching(self, slot: int, last: array[int], size: int) -> int:
        """Return how many tokens before a place are the last ones; the last ``size`` are."""
        ring, most = self._ring, len(last)
        while size < most and ring[slot - 1 - size] == last[-1 - size]:
            size += 1
        return size

    def _forget_oldest(self) -> int:
        """Wipe the oldest text, so that nothing of it is ever found; return its tokens."""
        start, size, _ = self._texts.popleft()
        slots = self._slots(start, size)
        np.frombuffer(self._ring, np.int32)[slots] = BORDER
        np.frombuffer(self._text, np.int32)[slots] = -1
        del self._tenants[start]
        self.tokens -= size
        return size

    def _slots(self, start: int, size: int) -> npt.NDArray[np.int64]:
        return np.arange(start, start + size) % self.capacity

    def _chain(
        self,
        tenant: bytes,
        tokens: list[int],
        context: int,
        slots: npt.NDArray[np.int64],  # [len(tokens) + 1]
    ) -> None:
        """Chain the places of a text that tokens of the answer are at."""
        ids, root = np.array(tokens, np.uint64), np.uint64(_root(tenant))
        for n, newest, before in zip(SIZES, self._newest, self._before, strict=True):
            first = max(n, context)
            if first >= len(ids):
                continue
            hashes = np.full(len(ids) - first, root)
            for place in range(first - n, first):
                hashes = (hashes + ids[place : place + len(hashes)]) * np.uint64(_FACTOR)
            buckets = (hashes >> np.uint64(32)) % np.uint64(self.capacity)
            order = np.argsort(buckets, kind="stable")
            bucket, slot = buckets[order], slots[first:-1][order]
            links = np.frombuffer(newest, np.int32)[bucket]
            same = bucket[1:] == bucket[:-1]
            links[1:][same] = slot[:-1][same]
            np.frombuffer(before, np.int32)[slot] = links
            np.frombuffer(newest, np.int32)[bucket] = slot  # of equal ones the last

    def _bucket(self, mixed: int, ngram: Iterable[int]) -> int:
        """Return where the newest place after an n-gram is noted; ``mixed`` begins as a tenant's
        root.
        """
        for token in ngram:
            mixed = (mixed + token) * _FACTOR & _64_BITS
        return (mixed >> 32) % self.capacity


def _root(tenant: bytes) -> int:
    return int.from_bytes(tenant[:8], "little")


def _borders(size: int) -> array[int]:
    return array("i", (BORDER,)) * size
