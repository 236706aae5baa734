"""A verification step, all on the device: choice of nodes, layout, target pass, draw, acceptance,
moves of KV and commit.

Nothing of it depends on values that the host must know, so that its CUDA graphs serve every step of
the same number of rows and tokens. ``device`` runs it for the engine that looks ahead; without
lookahead the host draws and accepts.
"""

from __future__ import annotations

import numpy as np
import torch

from backend.engines.cuda import trees
from backend.engines.cuda.forward import DecodePass
from backend.engines.cuda.kernels import Kernels
from backend.engines.cuda.pages import PAGE
from backend.engines.cuda.plain import mix
from backend.engines.cuda.stream import DTYPES

OPTIONS: dict[str, tuple[type, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "seed": (np.int64, 0),
}
"""A request's options on the device: their type, and the value of a request that has none (a
temperature of 0 is greedy). The seed is mixed, as ``sampling.randomness`` does it.
"""


class Slots:
    """The device's state of each admitted sequence; a row of a step names its slot.

    ``states`` is the shape [taps, hidden] of what drafts read of a sequence, in ``dtype``; a head
    may propose at most ``text_rows`` tokens of a sequence's text.
    """

    def __init__(
        self,
        slots: int,
        blocks: int,
        device: torch.device,
        *,
        states: tuple[int, int] = (0, 0),
        text_rows: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.table = torch.zeros(slots, blocks, dtype=torch.int32, device=device)
        """int32[slots, blocks]: the pages of each sequence."""
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64[slots]: tokens whose KV is there, which are all but the last one."""
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64[slots]: the last token."""
        self.options = {
            name: torch.full((slots,), off, dtype=DTYPES[kind], device=device)
            for name, (kind, off) in OPTIONS.items()
        }
        """[slots] each."""
        self.states = torch.zeros(slots, *states, dtype=dtype, device=device)
        """[slots, taps, hidden]: what the target had at the place that ``last`` was drawn from."""
        self.text_tokens = torch.full((slots, text_rows), -1, dtype=torch.int64, device=device)
        """int64[slots, text_rows]: tokens of the text that have no static row, -1 for none."""

    def drawing(
        self,
        kernels: Kernels,
        logits: torch.Tensor,
        slot: torch.Tensor,  # int64[rows]
        place: torch.Tensor,  # int64[rows]
        *,
        bounded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what tokens at ``place`` are drawn by from ``logits`` [rows, vocab]: temperature,
        the least logit that counts, and the noise word, [rows] each.
        """
        heat, *limits = (self.options[name][slot] for name in OPTIONS if name != "seed")
        words = mix(self.options["seed"][slot] ^ place)
        if bounded:
            return heat, kernels.bounds(logits, heat, *limits), words
        return heat, torch.full_like(heat, -torch.inf), words


class VerifyStep:
    """Verification in a pass: what lays the pass out (``layout``), and what draws, accepts and
    commits after it (``decide``).

    A row's proposal has at most ``columns`` nodes, at most ``most - 1`` of them are accepted.
    """

    def __init__(self, target: DecodePass, slots: Slots, columns: int, *, most: int) -> None:
        rows, device, long = target.inputs.size.rows, target.model.device, torch.int64
        self.model, self.slots, self.rows, self.most = target.model, slots, rows, most
        self.target, self._columns = target, columns
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
        self.is_verified = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        """int32[rows, columns], 1 for a node that is verified: written."""
        self.emitted = torch.zeros(rows, most, dtype=long, device=device)
        """int64[rows, most]: the first ``count`` are written; -1 where logits are no numbers."""
        self.count = torch.zeros(rows, dtype=long, device=device)
        """int64[rows]: written."""
        self.path = torch.zeros(rows, most, dtype=torch.int32, device=device)
        """int32[rows, most], local places in the pass (``trees``): written."""
        tokens = target.inputs.size.tokens
        self._origin, self._owner = (
            torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)
        )

    def run(self, *, bounded: bool = False) -> None:
        """Launch the step. ``bounded``: rows may have top-k, top-p or min-p."""
        self.layout()
        self.target.launch()
        self.decide(bounded=bounded)

    def layout(self) -> None:
        """Choose the likeliest nodes of the batch, and write the pass's columns."""
        slots, read = self.slots, self.target.inputs.device
        read["table"].copy_(slots.table[self.slot])
        read["start"].copy_(slots.length[self.slot])
        budget = self.target.inputs.size.tokens - self.rows
        if self._columns and budget:
            self.is_verified.copy_(trees.choose(self.chance, budget, self.room))
        else:
            self.is_verified.zero_()
        read["first"][1:] = (self.is_verified.sum(1) + 1).cumsum(0)
        nodes = self.is_verified, self.token, self.parent
        texts = slots.length[self.slot], slots.last[self.slot], read["table"], read["first"]
        node_columns = [read[name] for name in ("ids", "position", "ancestors", "place")]
        columns = (*node_columns, self._origin, self._owner)
        self.model.kernels.pack(*nodes, *texts, *columns, page=PAGE, scratch=self.model.scratch)

    def decide(self, *, bounded: bool) -> None:
        """Draw, accept, move the KV of accepted nodes and commit."""
        slots, kernels, read = self.slots, self.model.kernels, self.target.inputs.device
        length = slots.length[self.slot]
        tokens = self._draw(self.target.logits, bounded=bounded)
        tree, results = (read["ids"], self._origin, read["first"]), (self.emitted, self.path)
        kernels.walk(tokens, *tree, *results, self.count, places=self.target.most)
        for kv in self.model.stacked_kv:
            kernels.move(kv, read["table"], read["start"], self.path, self.count)
        if (states := self.target.states) is not None:
            final = self.path.gather(1, self.count[:, None] - 1)[:, 0] + read["first"][:-1]
            slots.states[self.slot] = states[final].to(slots.states.dtype)
        last = self.emitted.gather(1, self.count[:, None] - 1)[:, 0]
        slots.last[self.slot] = last.clamp(min=0)  # -1 is no token to embed
        slots.length[self.slot] = length + self.count

    def _draw(self, logits: torch.Tensor, *, bounded: bool) -> torch.Tensor:
        """Return the token drawn at every place of the pass, int32[tokens], from its ``logits``
        [tokens, vocab].
        """
        place, slot = self.target.inputs.device["position"] + 1, self.slot[self._owner]
        kernels = self.model.kernels
        options = self.slots.drawing(kernels, logits, slot, place, bounded=bounded)
        return kernels.draw(logits, *options)
