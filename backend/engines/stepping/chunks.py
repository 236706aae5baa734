"""The tokens of a sequence that a pass runs, and the place of a sequence's KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from backend.sequence import BLOCK_TOKENS

Slots = npt.NDArray[np.int64]
"""Places [n] in a pool of KV."""


class KVTable:
    """Places of a sequence's positions in the pool: position p at ``slots[p]``, in block
    ``numbers[p // BLOCK_TOKENS]``.
    """

    def __init__(self, blocks: Seq[int]) -> None:
        self.numbers = np.array(blocks, np.int32)

    @cached_property
    def slots(self) -> Slots:
        """The slot of every position."""
        begins = self.numbers.astype(np.int64)[:, None] * BLOCK_TOKENS
        return (begins + np.arange(BLOCK_TOKENS)).ravel()

    def __len__(self) -> int:
        return len(self.numbers) * BLOCK_TOKENS


@dataclass(slots=True)
class PassChunk:
    """One sequence's rows of a pass; KV is written in their order.

    Treat it as immutable: it is not frozen, because that costs microseconds.
    """

    tokens: list[int]
    start: int
    """Tokens before these."""
    table: KVTable
    logits: int
    """Last rows that want logits."""
    parents: Seq[int] = ()
    """The parents of the last rows, which are a tree: an earlier node, or the row before the tree
    (-1). A node sees its ancestors and itself, and has the position of its depth; all other rows
    are a chain.
    """
    prompt_rows: int = 0
    """First rows that are of the prompt."""

    @property
    def positions(self) -> list[int]:
        """Return the position of every row."""
        root = self.start + len(self.tokens) - len(self.parents) - 1
        nodes: list[int] = []
        for parent in self.parents:
            nodes.append(1 + (nodes[parent] if parent >= 0 else root))
        return [*range(self.start, root + 1), *nodes]


def ancestors(parents: Seq[int]) -> npt.NDArray[np.bool_]:
    """Return whether a node sees another, bool[nodes, nodes]: its ancestors and itself."""
    is_above = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            is_above[node] |= is_above[parent]
    return is_above


def logit_rows(chunks: Seq[PassChunk]) -> list[int]:
    """Return which rows of a pass want logits."""
    wanted: list[int] = []
    row = 0
    for chunk in chunks:
        row += len(chunk.tokens)
        wanted += range(row - chunk.logits, row)
    return wanted


def moves(accepted: Seq[tuple[PassChunk, Seq[int]]]) -> tuple[Slots, Slots]:
    """Return the slots that accepted nodes' KV was written to, in the order of rows, and those of
    their places in the text, where these are others.
    """
    sources: list[int] = []
    targets: list[int] = []
    for chunk, path in accepted:
        slots = chunk.table.slots[chunk.start + len(chunk.tokens) - len(chunk.parents) :]
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        sources += [slots[node] for node, _ in moved]
        targets += [slots[place] for _, place in moved]
    return np.array(sources, np.int64), np.array(targets, np.int64)
