"""The tokens of a sequence that a pass runs, and the place of a sequence's KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from backend.sequence import BLOCK_TOKENS


class KVTable:
    """Places of a sequence's positions in the pool: position p at ``slots[p]``, in block ``blocks[p
    // BLOCK_TOKENS]``; ``numbers`` are the blocks on the host.
    """

    def __init__(self, blocks: Seq[int], device: torch.device | str) -> None:
        self.numbers = np.array(blocks, np.int32)
        self._device = device

    @cached_property
    def blocks(self) -> torch.Tensor:
        """The block numbers on the device, where a pass may do without them."""
        return torch.from_numpy(self.numbers).to(self._device, torch.int64)

    @cached_property
    def slots(self) -> torch.Tensor:
        """The slot of every position, on the device."""
        return (
            self.blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=self._device)
        ).flatten()

    def __len__(self) -> int:
        return len(self.numbers) * BLOCK_TOKENS

    def read(self, pool: torch.Tensor, positions: int) -> torch.Tensor:
        """Return the first ``positions`` positions [positions, ...] of a pool [slots, ...].

        It copies whole blocks, also where they are neighbours: attention over a view of the pool
        takes 1.1 to 1.9 times as long on a CPU.
        """
        blocks = pool.view(-1, BLOCK_TOKENS, *pool.shape[1:]).index_select(
            0, self.blocks[: -(-positions // BLOCK_TOKENS)]
        )
        return blocks.flatten(0, 1)[:positions]


@dataclass(slots=True)
class Chunk:
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


def ancestors(parents: Seq[int]) -> torch.Tensor:
    """Return whether a node sees another, bool[nodes, nodes]: its ancestors and itself."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def logit_rows(chunks: Seq[Chunk]) -> list[int]:
    """Return which rows of a pass want logits."""
    wanted: list[int] = []
    row = 0
    for chunk in chunks:
        row += len(chunk.tokens)
        wanted += range(row - chunk.logits, row)
    return wanted


def moves(accepted: Seq[tuple[Chunk, Seq[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that accepted nodes' KV was written to, in the order of rows, and those of
    their places in the text, where these are others.
    """
    sources, targets = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for chunk, path in accepted:
        slots = chunk.table.slots[chunk.start + len(chunk.tokens) - len(chunk.parents) :]
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        if moved:
            nodes, places = torch.tensor(moved, device=slots.device).T
            sources.append(slots[nodes])
            targets.append(slots[places])
    device = sources[-1].device
    joined = [torch.cat([part.to(device) for part in parts]) for parts in (sources, targets)]
    return joined[0], joined[1]
