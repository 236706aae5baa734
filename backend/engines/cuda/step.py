"""A verification step, all on the device: choice of nodes, layout, target pass, draw, acceptance,
moves of KV and commit.

Nothing of it depends on values that the host must know, so that one CUDA graph serves every step of
the same number of rows and tokens. ``device`` runs it for the engine that looks ahead; without
lookahead the host draws and accepts.
"""

from __future__ import annotations

import torch

from backend.engines.cuda import trees
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.noise import mix
from backend.engines.cuda.pages import PAGE, Layout


class Slots:
    """The device's state of each admitted sequence; a row of a step names its slot.

    ``states`` is the shape [taps, hidden] of what drafts read of a sequence, in ``dtype``; a head
    may propose at most ``own`` tokens of a sequence's text.
    """

    def __init__(
        self,
        slots: int,
        blocks: int,
        device: torch.device,
        *,
        states: tuple[int, int] = (0, 0),
        own: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.table = torch.zeros(slots, blocks, dtype=torch.int32, device=device)
        """int32[slots, blocks]: the pages of each sequence."""
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64[slots]: tokens whose KV is there, which are all but the last one."""
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64[slots]: the last token."""
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64[slots]: the mixed seed, as ``sampling.randomness`` makes it."""
        self.temperature = torch.zeros(slots, device=device)
        """float32[slots]: 0 is greedy."""
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        """int32[slots]: 0 is off."""
        self.top_p = torch.ones(slots, device=device)
        """float32[slots]: 1 is off."""
        self.min_p = torch.zeros(slots, device=device)
        """float32[slots]: 0 is off."""
        self.states = torch.zeros(slots, *states, dtype=dtype, device=device)
        """[slots, taps, hidden]: what the target had at the place that ``last`` was drawn from."""
        self.own = torch.full((slots, own), -1, dtype=torch.int64, device=device)
        """int64[slots, own]: tokens of the text that a head has no static row for, -1 for none."""


class VerifyStep:
    """One bucket: ``rows`` sequences that verify ``tokens - rows`` nodes in all.

    A row's proposal has at most ``columns`` nodes, at most ``most - 1`` of them are accepted, and
    the row at most ``keys`` tokens with it. ``bounded``: rows may have top-k, top-p or min-p.
    """

    def __init__(
        self,
        model: PagedModel,
        slots: Slots,
        rows: int,
        columns: int,
        *,
        tokens: int,
        most: int,
        keys: int,
        bounded: bool = False,
    ) -> None:
        device, long = model.device, torch.int64
        self.model, self.slots, self.rows, self.most = model, slots, rows, most
        self._columns, self._keys, self.bounded = columns, keys, bounded
        self.slot = torch.arange(rows, device=device)
        """int64[rows]: read."""
        self.token = torch.zeros(rows, columns, dtype=long, device=device)
        """int64[rows, columns], the nodes' tokens: read."""
        self.parent = torch.arange(-1, columns - 1, dtype=torch.int32, device=device)
        self.parent = self.parent.repeat(rows, 1)
        """int32[rows, columns], the column of a node's parent, -1 for the text: read."""
        self.chance = torch.zeros(rows, columns, device=device)
        """float32[rows, columns], the probability of a node's path, 0 for no node: read."""
        self.room = torch.full((rows,), columns, dtype=torch.int32, device=device)
        """int32[rows], the nodes that a row's blocks have room for: read."""
        self.chosen = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        """int32[rows, columns], 1 for a node that is verified: written."""
        self.emitted = torch.zeros(rows, most, dtype=long, device=device)
        """int64[rows, most]: the first ``count`` are written; -1 where logits are no numbers."""
        self.count = torch.zeros(rows, dtype=long, device=device)
        """int64[rows]: written."""
        self.path = torch.zeros(rows, most, dtype=torch.int32, device=device)
        """int32[rows, most], local places in the pass (``trees``): written."""
        self._first = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._ids, self._position, self._ancestors = (
            torch.zeros(tokens, dtype=long, device=device) for _ in range(3)
        )
        self._place, self._origin, self._owner = (
            torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._no_bound = torch.full((tokens,), -torch.inf, device=device)

    def run(self) -> None:
        """Launch the step."""
        slots, kernels = self.slots, self.model.kernels
        length, last = slots.length[self.slot], slots.last[self.slot]
        table, start = slots.table[self.slot], length.int()
        budget = len(self._ids) - self.rows
        if self._columns:
            self.chosen.copy_(trees.choose(self.chance, budget, self.room))
            self._first[1:] = (self.chosen.sum(1) + 1).cumsum(0)
        kernels.pack(
            self.chosen,
            self.token,
            self.parent,
            length,
            last,
            table,
            self._first,
            self._ids,
            self._position,
            self._ancestors,
            self._place,
            self._origin,
            self._owner,
            page=PAGE,
            scratch=self.model.scratch,
        )
        places = min(self._columns, budget) + 1
        layout = Layout(table, start, self._first, self._ancestors, self._place, places, self._keys)
        logits = self.model.run(self._ids, self._position, layout)
        drawn = self._draw(logits)
        kernels.walk(
            drawn,
            self._ids,
            self._origin,
            self._first,
            self.emitted,
            self.path,
            self.count,
            places=places,
        )
        for kv in self.model.stacked_kv:
            kernels.move(kv, table, start, self.path, self.count)
        if self.model.states is not None:
            final = self.path.gather(1, self.count[:, None] - 1)[:, 0] + self._first[:-1]
            slots.states[self.slot] = self.model.states[final].to(slots.states.dtype)
        last = self.emitted.gather(1, self.count[:, None] - 1)[:, 0]
        slots.last[self.slot] = last.clamp(min=0)  # -1 is no token to embed
        slots.length[self.slot] = length + self.count

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the token drawn at every place of the pass, int32[tokens]."""
        slots, kernels = self.slots, self.model.kernels
        slot = self.slot[self._owner]
        temperature = slots.temperature[slot]
        words = mix(slots.seed[slot] ^ (self._position + 1))
        bound = self._no_bound
        if self.bounded:
            limits = (slots.top_k[slot], slots.top_p[slot], slots.min_p[slot])
            bound = kernels.bounds(logits, temperature, *limits)
        return kernels.draw(logits, temperature, bound, words)
