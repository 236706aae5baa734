"""Ownership of KV blocks: one block table per sequence, which the target and every draft that
keeps KV share.

Their pools have the same number of blocks and they run on the same positions, so a sequence's
blocks are the same in each of them: a draft never lacks the room that the target has, and nothing
is decided per draft.

With prefix reuse, sequences whose texts begin alike have the complete blocks of that beginning in
common, also with one that has ended as long as there is room. The ledger hands out blocks by their
content; what KV of it an engine has is the engine's own knowledge (``Engine.unseen``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from backend.core.block_pool import BlockObserver, BlockPool, block_key, root_key
from backend.engines.port import Engine
from backend.ops.stats import Reuse
from backend.sequence import BLOCK_TOKENS, Sequence

GROWTH_BLOCKS = 2
"""Blocks by which every active sequence must be able to grow before another is admitted:
pre-empting that soon wastes its prefill.

Measured (docs/results/admission.json): fewer cost more pre-emptions where texts are long, more
leave room unused where they are short.
"""


class KVLedger:
    """Gives sequences blocks as they grow; with ``guaranteed`` a sequence gets those of its whole
    life at admission.

    A sequence needs its tokens and ``headroom_tokens`` more: k_max + 1 for each turn that
    may be in flight, whose proposal a verification writes and may reject. ``target`` turns prefix
    reuse on: blocks are worth keeping that it has KV of.
    """

    def __init__(
        self,
        pools: Mapping[str, int],
        headroom_tokens: int,
        *,
        guaranteed: bool = False,
        growth_blocks: int = GROWTH_BLOCKS,
        target: Engine | None = None,
    ) -> None:
        """Take the blocks of each engine's pool by the engine's name; 0 is an engine without KV."""
        sizes = {name: blocks for name, blocks in pools.items() if blocks}
        self._engines = tuple(sizes)
        self.pool = BlockPool(min(sizes.values(), default=0))
        """The blocks that all engines' tables name."""
        self._tables: dict[int, list[int]] = {}
        self._headroom_tokens = headroom_tokens
        self._guaranteed = guaranteed
        self._growth_blocks = 0 if guaranteed else growth_blocks
        self._target = target if sizes else None
        self._is_invariant = target is not None and target.limits.invariant
        self._reuse = Reuse()
        self._observer: BlockObserver | None = None

    def observe(self, observer: BlockObserver) -> None:
        """Report blocks from now on: those that another request can find by its prompt. Those with
        a salt are not reported: a router would compare them with other tenants' prompts.
        """
        self._observer = observer
        self.pool.on_forget = observer.remove_block

    def blocks_needed(self, tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens needs (0 where no engine keeps
        KV).
        """
        return -(-(tokens + self._headroom_tokens) // BLOCK_TOKENS) if self._engines else 0

    def fits_ever(self, life_tokens: int) -> bool:
        """Return whether a sequence of this many tokens fits an empty ledger."""
        return self.blocks_needed(life_tokens) <= self.pool.size

    def reserve(self, sequence: Sequence, life_tokens: int) -> bool:
        """Write a block table into a sequence that may grow to ``life_tokens``; False when there is
        no room for it now.

        Room is what the sequence needs beyond the blocks that others share with it, and
        ``growth_blocks`` for each of the others. The block of the last token is its own: that token
        is run again for its logits, and a shared block is never written twice.
        """
        shared = self._shared_blocks(sequence)
        need = self.blocks_needed(life_tokens if self._guaranteed else len(sequence.tokens)) - len(
            shared
        )
        idle = sum(map(self.pool.is_cached, shared))
        if self.pool.available - idle < need + self._growth_blocks * len(self._tables):
            return False
        self.pool.share(shared)
        sequence.new_blocks += need
        sequence.reused_blocks += len(shared)
        table = self._tables[sequence.id] = shared + self.pool.allocate(need)
        sequence.blocks.update(dict.fromkeys(self._engines, table))
        if self._target is not None:
            self._publish(sequence, table, len(shared))
            self._reuse.reused += len(shared)
            self._reuse.missed += (len(sequence.tokens) - 1) // BLOCK_TOKENS - len(shared)
            self._reuse.tokens += (
                len(sequence.tokens) - self._target.unseen(sequence) if shared else 0
            )
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Extend the sequence's table to what its next step may write; False (and unchanged) when
        there is no room for that.
        """
        table, tokens = self._tables[sequence.id], len(sequence.tokens)
        missing = self.blocks_needed(tokens) - len(table)
        if missing > 0:
            if missing > self.pool.available:
                return False
            table += self.pool.allocate(missing)
            sequence.new_blocks += missing
        complete = len(sequence.keys)
        if tokens // BLOCK_TOKENS > complete and self._target is not None:
            self._name_blocks(sequence)
            self._publish(sequence, table, complete)
        return True

    def change_engines(self, pools: Mapping[str, int], sequences: Iterable[Sequence]) -> None:
        """Give the tables of ``sequences`` (all that have one) to these engines. Raises ValueError
        for a pool with too few blocks.
        """
        sizes = {name: blocks for name, blocks in pools.items() if blocks}
        if few := {name: blocks for name, blocks in sizes.items() if blocks < self.pool.size}:
            raise ValueError(f"the engines share {self.pool.size} KV blocks, got {few}")
        self._engines = tuple(sizes)
        for sequence in sequences:
            sequence.blocks.clear()
            sequence.blocks.update(dict.fromkeys(self._engines, self._tables[sequence.id]))

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; a second call does nothing. Call it before the target
        forgets the sequence.

        Tokens with KV in the target stay to be found by others until the room is needed.
        """
        table = self._tables.pop(sequence.id, None)
        if table is not None:
            valid = 0
            if self._target is not None:
                self._name_blocks(sequence)
                valid = (len(sequence.tokens) - self._target.unseen(sequence)) // BLOCK_TOKENS
                self._publish(sequence, table, 0)
            self.pool.drop(table, valid)
        sequence.blocks.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless exactly these sequences have a table, share blocks of equal
        text only, in which at most one of them has its last token and so writes, and have the keys
        of their own text.
        """
        tables: dict[int, list[int]] = {}
        texts: dict[int, tuple[str, list[int]]] = {}
        writers = Counter[int]()
        for sequence in sequences:
            named = replace(sequence, keys=[])
            self._name_blocks(named)
            if sequence.keys != named.keys[: len(sequence.keys)]:
                raise RuntimeError(f"sequence {sequence.id} has a key of tokens not committed")
            table = tables[sequence.id] = next(iter(sequence.blocks.values()), [])
            for index, block in enumerate(table):
                stop = (index + 1) * BLOCK_TOKENS
                text = sequence.salt, sequence.tokens[:stop]
                if texts.setdefault(block, text) != text:
                    where = f"block {index} of sequence {sequence.id}"
                    raise RuntimeError(f"KV block {block}, {where}, is one of another text")
                writers[block] += len(sequence.tokens) <= stop
        if several := [block for block, count in writers.items() if count > 1]:
            raise RuntimeError(f"KV blocks {several} are written by several sequences")
        if tables != self._tables:
            raise RuntimeError(f"KV tables {self._tables}, expected {tables}")
        self.pool.check(tables.values())

    def usage(self) -> dict[str, int]:
        """Return how many blocks are ``used`` and how many ``free``; of the latter ``cached`` ones
        have KV that can be used again.
        """
        return {
            "used": self.pool.size - self.pool.available,
            "free": self.pool.available,
            "cached": self.pool.cached,
        }

    def take_reuse(self) -> Reuse:
        """Return the prefix reuse since the last call."""
        reuse, self._reuse = self._reuse, Reuse()
        reuse.evicted, self.pool.evicted = self.pool.evicted, 0
        return reuse

    def _shared_blocks(self, sequence: Sequence) -> list[int]:
        if self._target is None:
            return []
        self._name_blocks(sequence)
        return self.pool.find(sequence.keys[: (len(sequence.tokens) - 1) // BLOCK_TOKENS])

    def _name_blocks(self, sequence: Sequence) -> None:
        """Bring the keys up to the sequence's complete blocks."""
        keys, tokens = sequence.keys, sequence.tokens
        for index in range(len(keys), len(tokens) // BLOCK_TOKENS):
            parent = keys[-1] if keys else root_key(sequence.salt)
            stop = (index + 1) * BLOCK_TOKENS
            generated = self._is_invariant and stop > sequence.prompt_tokens
            content = tokens[index * BLOCK_TOKENS : stop]
            keys.append(block_key(parent, content, sequence.prompt_tokens if generated else -1))

    def _publish(self, sequence: Sequence, table: list[int], start: int) -> None:
        for index in range(start, len(sequence.keys)):
            is_new = self.pool.publish(sequence.keys[index], table[index])
            if is_new and self._observer is not None and not sequence.salt:
                stop = (index + 1) * BLOCK_TOKENS
                if not self._is_invariant or stop <= sequence.prompt_tokens:
                    parent = sequence.keys[index - 1] if index else None
                    tokens = sequence.tokens[stop - BLOCK_TOKENS : stop]
                    self._observer.add_block(sequence.keys[index], parent, tokens)
