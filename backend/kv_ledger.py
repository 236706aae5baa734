"""Who owns which KV block: one block table per sequence, which the target and every draft that keeps KV share.

Their pools have the same number of blocks and they run on the same positions, so a sequence's blocks are the same in each of them: a draft
never lacks the room that the target has, and nothing is decided per draft.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.ports import BLOCK_TOKENS, Sequence

GROWTH_BLOCKS = 4
"""Blocks by which every active sequence must be able to grow before another is admitted: pre-empting that soon wastes its prefill.

Chosen with ``tests.bench.bench_admission``: fewer cost more pre-emptions where texts are long, more leave room unused where they are short.
"""


class KVLedger:
    """Gives sequences blocks as they grow; with ``guaranteed`` a sequence gets those of its whole life at admission.

    What a sequence needs is its tokens and ``headroom_tokens`` (k_max + 1) more, for proposals that a verification writes and may reject.
    """

    def __init__(
        self, pools: Mapping[str, int], headroom_tokens: int, *, guaranteed: bool = False, growth_blocks: int = GROWTH_BLOCKS
    ) -> None:
        """Take the blocks of each engine's pool by the engine's name; 0 is an engine without KV."""
        sizes = {name: blocks for name, blocks in pools.items() if blocks}
        self._engines = tuple(sizes)
        self._size = min(sizes.values(), default=0)
        self._free = list(range(self._size))
        self._tables: dict[int, list[int]] = {}
        self._headroom_tokens = headroom_tokens
        self._guaranteed = guaranteed
        self._growth_blocks = 0 if guaranteed else growth_blocks

    def blocks_needed(self, tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens needs (0 where no engine keeps KV)."""
        return -(-(tokens + self._headroom_tokens) // BLOCK_TOKENS) if self._engines else 0

    def fits_ever(self, life_tokens: int) -> bool:
        """Return whether a sequence of so many tokens fits an empty ledger."""
        return self.blocks_needed(life_tokens) <= self._size

    def reserve(self, sequence: Sequence, life_tokens: int) -> bool:
        """Write a block table into a sequence that may grow to ``life_tokens``; False when there is no room for it now.

        Room is what the sequence needs, and ``growth_blocks`` for each of the others.
        """
        need = self.blocks_needed(life_tokens if self._guaranteed else len(sequence.tokens))
        if len(self._free) < need + self._growth_blocks * len(self._tables):
            return False
        table = self._tables[sequence.id] = self._take(need)
        sequence.blocks.update(dict.fromkeys(self._engines, table))
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Extend the sequence's table to what its next step may write; False (and unchanged) when there is no room for that."""
        table = self._tables[sequence.id]
        missing = self.blocks_needed(len(sequence.tokens)) - len(table)
        if missing > len(self._free):
            return False
        if missing > 0:
            table += self._take(missing)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; a second call does nothing."""
        self._free += self._tables.pop(sequence.id, [])
        sequence.blocks.clear()

    def usage(self) -> dict[str, int]:
        """Return how many blocks are ``used`` and how many ``free``."""
        return {"used": self._size - len(self._free), "free": len(self._free)}

    def _take(self, count: int) -> list[int]:
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken
