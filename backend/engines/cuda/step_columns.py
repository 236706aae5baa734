"""The rows of a step, and the columns by which the host gives them to the device and gets back what
became of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.cuda.step import OPTIONS, Slots, VerifyStep
from backend.engines.cuda.stream import PinnedColumns, Stream
from backend.request import SamplingParams

MOST_HEADS = 8
"""Heads that can propose on the device."""

Updates = tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]
"""Slot, column and value of new entries of block tables, and of texts' own tokens."""


@dataclass(slots=True)
class DeviceRow:
    """One sequence's share of a step."""

    slot: int
    """The slot in ``Slots``."""
    length: int
    """Tokens with KV, all but the last; at least these where ``follows``."""
    last: int
    """The last token; unread where ``follows``."""
    follows: bool
    """Whether it goes on from whatever the step before leaves in its slot."""
    sampling: SamplingParams
    seed: int
    """The mixed seed (``sampling.randomness``)."""
    head: str = ""
    """The head that proposes; empty: the host did, or nothing is proposed."""
    places: int = 0
    """The length of the head's longest path, in tokens."""
    budget: int = 0
    """Nodes that this row adds to those the batch verifies."""
    room: int = 0
    """The nodes that its blocks have room for."""
    tokens: Sequence[int] = ()
    """Tokens of the host's proposal, whose parents are ``parents``."""
    parents: Sequence[int] = ()

    def option(self, name: str) -> float:
        """Return an option as the device has it (``step.OPTIONS``)."""
        if name == "seed":
            return self.seed
        is_greedy = name == "temperature" and self.sampling.greedy
        return 0.0 if is_greedy else float(getattr(self.sampling, name))


class StepColumns:
    """The columns that all steps of a number of rows read and write; a row's proposal has at most
    ``columns`` nodes.
    """

    def __init__(
        self, stream: Stream, rows: int, columns: int, *, most: int, slots: Slots, idle_block: int
    ) -> None:
        self._idle_block, self._slots = idle_block, slots
        self.most_updates = 256 + 8 * rows
        """Entries of block tables, and of texts' own tokens, that one step can bring along."""
        of_row, of_node = (rows,), (rows, columns)
        long, short, real = np.int64, np.int32, np.float32
        self.inputs = PinnedColumns(
            {
                "slot": (long, of_row),
                "length": (long, of_row),
                "last": (long, of_row),
                "token": (long, of_node),
                "follows": (short, of_row),
                "room": (short, of_row),
                "parent": (short, of_node),
                **{name: (kind, of_row) for name, (kind, _) in OPTIONS.items()},
                "chance": (real, of_node),
                "places": (short, (MOST_HEADS, rows)),
                "updates": (long, (2, 3, self.most_updates)),
            },
            stream,
        )
        self._outputs = PinnedColumns(
            {
                "emitted": (long, (rows, most)),
                "count": (long, of_row),
                "token": (long, of_node),
                "parent": (short, of_node),
                "is_verified": (short, of_node),
                "chance": (real, of_node),
            },
            stream,
        )

    def share_with(self, step: VerifyStep) -> None:
        """Let a step read and write these columns."""
        for name in ("slot", "token", "parent", "chance", "room"):
            setattr(step, name, self.inputs.device[name])
        for name in ("emitted", "count", "is_verified"):
            setattr(step, name, self._outputs.device[name])

    def fill(
        self, rows: Sequence[DeviceRow], heads: Mapping[str, int], updates: Updates, idle: int
    ) -> None:
        """Write the host's columns; the rows left over are the slot ``idle``. ``heads`` are the
        heads' numbers.
        """
        host = self.inputs.host
        for column in host.values():
            column.fill(0)
        host["slot"].fill(idle)
        host["parent"].fill(-1)
        host["updates"][:, 0], host["updates"][0, 2] = idle, self._idle_block
        count = len(rows)
        for name in ("slot", "follows", "length", "last", "room"):
            host[name][:count] = [getattr(row, name) for row in rows]
        for name, (_, off) in OPTIONS.items():
            host[name][count:] = off
            host[name][:count] = [row.option(name) for row in rows]
        for number, row in enumerate(rows):
            if row.head:
                host["places"][heads[row.head], number] = row.places
            elif nodes := len(row.tokens):
                host["token"][number, :nodes] = row.tokens
                host["parent"][number, :nodes] = row.parents
                host["chance"][number, :nodes] = 2.0  # before all that heads propose
        for column, new in zip(host["updates"], updates, strict=True):
            column[:, : len(new)] = np.array(new, np.int64).reshape(-1, 3).T

    def send(self) -> None:
        """Copy what was filled in to the device."""
        self.inputs.send()

    def update_slots(self) -> None:
        """Launch what brings the slots of the rows up to date."""
        slots, columns = self._slots, self.inputs.device
        where, column, value = columns["updates"].unbind(1)
        slots.table[where[0], column[0]] = value[0].int()
        if slots.text_tokens.shape[1]:
            slots.text_tokens[where[1], column[1]] = value[1]
        slot, follows = columns["slot"], columns["follows"] > 0
        for values, new in ((slots.length, columns["length"]), (slots.last, columns["last"])):
            values[slot] = torch.where(follows, values[slot], new)
        for name, values in slots.options.items():
            values[slot] = columns[name]

    def fetch(self) -> dict[str, npt.NDArray[Any]]:
        """Copy what a step wrote, and the nodes, to the host's columns, which are returned."""
        for name in ("token", "parent", "chance"):
            self._outputs.device[name].copy_(self.inputs.device[name])
        return self._outputs.fetch()
