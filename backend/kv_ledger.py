"""Who owns which KV block: one ledger over the block pools of the target and of every draft that keeps KV."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from backend.ports import BLOCK_TOKENS, Sequence


class BlockPool:
    """Blocks ``0..size-1`` of one engine, given out in contiguous runs where possible (an engine reads those without a copy)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []  # runs (start, length), sorted, never adjacent

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return sum(length for _, length in self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` blocks, from the smallest run that holds them all, else from several runs; None when too few are free."""
        fitting = min((run for run in self._free if run[1] >= count), key=lambda run: run[1], default=None)
        if fitting is not None:
            return self._cut(fitting, count)
        if self.free_blocks < count:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            run = max(self._free, key=lambda item: item[1])
            blocks += self._cut(run, min(run[1], count - len(blocks)))
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Take blocks back, joining neighbouring runs."""
        for block in blocks:
            insort(self._free, (block, 1))
        joined: list[tuple[int, int]] = []
        for start, length in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined

    def _cut(self, run: tuple[int, int], count: int) -> list[int]:
        self._free.remove(run)
        if run[1] > count:
            insort(self._free, (run[0] + count, run[1] - count))
        return list(range(run[0], run[0] + count))


class KVLedger:
    """Reserves a sequence's whole life at admission, in every pool at once: nothing that was admitted is ever evicted.

    ``headroom_tokens`` (k_max + 1) is reserved beyond the last token, for proposals that a verification writes and may reject.
    """

    def __init__(self, pools: Mapping[str, int], headroom_tokens: int) -> None:
        self._pools = {name: BlockPool(size) for name, size in pools.items() if size}
        self._headroom_tokens = headroom_tokens

    def blocks_needed(self, tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens reserves in each pool."""
        return -(-(tokens + self._headroom_tokens) // BLOCK_TOKENS)

    def fits_ever(self, tokens: int) -> bool:
        """Return whether a sequence of so many tokens fits an empty ledger."""
        return all(self.blocks_needed(tokens) <= pool.size for pool in self._pools.values())

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Write block tables for ``tokens`` tokens into the sequence, all pools or none; False when some pool is too full now."""
        count = self.blocks_needed(tokens)
        if any(pool.free_blocks < count for pool in self._pools.values()):
            return False
        for name, pool in self._pools.items():
            blocks = pool.allocate(count)
            assert blocks is not None  # checked above, and only the loop thread allocates
            sequence.blocks[name] = blocks
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; a second call does nothing."""
        for name, blocks in sequence.blocks.items():
            self._pools[name].release(blocks)
        sequence.blocks.clear()

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return (used, size) in blocks by pool."""
        return {name: (pool.size - pool.free_blocks, pool.size) for name, pool in self._pools.items()}
