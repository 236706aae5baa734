"""Contents of an engine's KV pool: sequence by sequence, and by content of complete blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.engines.stepping.chunks import KVTable
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence


@dataclass(slots=True)
class Cache:
    """KV that the pool has of a sequence: the token ids run, position by position; the
    first ``agreed`` are committed.

    The engine knows the content of the first ``named`` blocks by their keys. ``proposed`` is its
    last proposal, for the places from ``proposed_at`` on.
    """

    blocks: list[int]
    table: KVTable
    ran: list[int] = field(default_factory=list)
    agreed: int = 0
    named: int = 0
    proposed_at: int = 0
    proposed: Proposal | None = None

    def matching(self, tokens: list[int]) -> int:
        """Return how many of the committed ``tokens`` have KV here. Looks only at what is new since
        the last call.
        """
        agreed, ran = self.agreed, self.ran
        stop = min(len(ran), len(tokens))
        while agreed < stop and ran[agreed] == tokens[agreed]:
            agreed += 1
        self.agreed = agreed
        return agreed

    def find_end(self, tokens: list[int]) -> int:
        """Return where the tokens end that the step of its last proposal emitted: what was accepted
        of it and one more.
        """
        if self.proposed is None:
            return 0
        return self.proposed_at + len(self.proposed.follow(tokens[self.proposed_at :])) + 1

    def roll_back(self, position: int) -> None:
        """Forget everything from ``position`` on: what was rejected, or is to be run again."""
        del self.ran[position:]
        self.agreed = min(self.agreed, position)

    def grew_into(self, blocks: list[int]) -> bool:
        """Return whether ``blocks`` is this cache's block table, perhaps with more at its end."""
        return self.blocks == blocks or self.blocks == blocks[: len(self.blocks)]


class Caches:
    """The caches of an engine's sequences. ``contents`` are the keys of complete blocks whose KV
    the pool has, whichever request ran it.
    """

    def __init__(self, name: str, kv_blocks: int) -> None:
        self.contents: dict[int, bytes] = {}
        self._name = name
        self._kv_blocks = kv_blocks
        self._caches: dict[int, Cache] = {}

    def of(self, sequence: Sequence) -> Cache:
        """Return the sequence's cache, made again when its block table did not just grow;
        ValueError without a usable table.
        """
        blocks = sequence.blocks.get(self._name)
        if not blocks:
            raise ValueError(f"sequence {sequence.id} has no block table for engine {self._name!r}")
        cache = self._caches.get(sequence.id)
        if cache is None or cache.blocks != blocks:
            if min(blocks) < 0 or max(blocks) >= self._kv_blocks:
                raise ValueError(
                    f"block table of sequence {sequence.id} must lie in "
                    f"0..{self._kv_blocks - 1}, got {blocks}"
                )
            table = KVTable(blocks)
            if cache and cache.grew_into(blocks):
                count, cache.blocks, cache.table = len(cache.blocks), list(blocks), table
            else:
                count = self.shared_blocks(sequence, blocks)
                tokens = count * BLOCK_TOKENS
                cache = self._caches[sequence.id] = Cache(
                    list(blocks), table, sequence.tokens[:tokens], tokens, count
                )
            for block in blocks[count:]:  # to be written now
                self.contents.pop(block, None)
        return cache

    def matching(self, sequence: Sequence) -> int:
        """Return how many committed tokens have KV here, and note the content of blocks that they
        now fill.
        """
        cache, blocks = self._caches.get(sequence.id), sequence.blocks.get(self._name, [])
        if cache is None or not cache.grew_into(blocks):
            if not self.shared_blocks(sequence, blocks):
                return 0
            cache = self.of(sequence)
        return self.matching_in(cache, sequence)

    def matching_in(self, cache: Cache, sequence: Sequence) -> int:
        """Return the same of a sequence whose cache is at hand (``of``)."""
        matching, keys = cache.matching(sequence.tokens), sequence.keys
        while cache.named < len(keys) and (cache.named + 1) * BLOCK_TOKENS <= matching:
            self.contents[cache.blocks[cache.named]] = keys[cache.named]
            cache.named += 1
        return matching

    def shared_blocks(self, sequence: Sequence, blocks: list[int]) -> int:
        """Return how many leading blocks of a new table have the sequence's KV already, run for
        another or before it lost its blocks.
        """
        pairs = enumerate(zip(blocks, sequence.keys, strict=False))
        return next(
            (i for i, (block, key) in pairs if self.contents.get(block) != key),
            min(len(blocks), len(sequence.keys)),
        )

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; what is known of the blocks' content stays."""
        for sequence_id in sequence_ids:
            self._caches.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self._caches.clear()
        self.contents.clear()
