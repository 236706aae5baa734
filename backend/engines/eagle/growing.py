"""Proposals of an EAGLE-3 head: trees that grow by one depth a pass, for all rows of a batch at
once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from backend.engines.eagle.model import EagleModel
from backend.engines.port import Turn
from backend.engines.spine import CANDIDATES
from backend.sampling.processing import Columns
from backend.sampling.verification import Row, candidates
from backend.sequence import BLOCK_TOKENS, ROOT


@dataclass(frozen=True, slots=True)
class _Path:
    """A path that a proposal goes on with."""

    node: int = ROOT
    """Its last node."""
    tokens: tuple[int, ...] = ()
    confidence: float = 1.0
    row: int = 0
    """The row, among its text's in the last pass, that proposed its last token."""


@dataclass(slots=True)
class Growing:
    """A proposal while it grows: its text has rows in ``blocks``, and ``state`` [hidden] is the
    fused one of the token before the last.
    """

    turn: Turn
    blocks: Seq[int]
    state: Tensor
    nodes: list[tuple[int, int, float]] = field(default_factory=list)
    """(token, parent, confidence of the path)."""
    paths: list[_Path] = field(default_factory=lambda: [_Path()])

    @property
    def end(self) -> int:
        """The place of the text's last token."""
        return len(self.turn.sequence.tokens) - 1

    def extend(self, found: Seq[Seq[tuple[int, float]]], columns: Columns, width: int) -> None:
        """Add the candidates (column, confidence) after each path, and go on with the ``width``
        likeliest.
        """
        grown = []
        for row, (path, ones) in enumerate(zip(self.paths, found, strict=True)):
            for column, confidence in ones:
                token = columns.token(column)
                node, whole = len(self.nodes), path.confidence * confidence
                self.nodes.append((token, path.node, whole))
                grown.append(_Path(node, (*path.tokens, token), whole, row))
        self.paths = sorted(grown, key=lambda path: -path.confidence)[:width]


def grow(
    growing: list[Growing], model: EagleModel, pool: Tensor, columns: Columns, width: int
) -> None:
    """Grow proposals to the length that their turns ask for. ``pool`` [slots, 2 kv_heads,
    head_dim] has the rows of the texts, and zeros in its last slot.
    """
    growing = sorted(growing, key=lambda one: -one.turn.run)  # those that end come last
    deepest = growing[0].turn.run
    text = _TextRows(growing, model.shape.sliding_window, model.device)
    scratch = 1 + (deepest - 1) * width
    kept = pool.new_empty(len(growing), text.count + scratch, *pool.shape[1:])
    kept[:, : text.count] = pool[text.slots]
    tokens = torch.tensor([[one.turn.sequence.tokens[-1]] for one in growing], device=model.device)
    hidden = torch.stack([one.state for one in growing])[:, None]
    lineage = torch.ones(len(growing), 1, 1, dtype=torch.bool, device=model.device)
    for depth in range(deepest):
        active = sum(one.turn.run > depth for one in growing)
        tokens, hidden, lineage = tokens[:active], hidden[:active], lineage[:active]
        seen = text.seen(active, depth)[:, None].expand(-1, tokens.shape[1], -1)
        mask = torch.cat([seen, lineage], 2)
        positions = (text.ends[:active] + depth).expand_as(tokens)
        keys = kept[:active, : mask.shape[2]]
        logits, carried = model.rows(tokens, hidden, positions, keys, mask)
        _extend(growing[:active], logits, columns, width)
        if depth + 1 < deepest:
            rows, chosen = _going_on(growing[:active], width, model.device)
            texts = torch.arange(active, device=model.device)[:, None]
            tokens, hidden = chosen, carried[texts, rows]
            own = torch.eye(width, dtype=torch.bool, device=model.device)
            lineage = torch.cat([lineage[texts, rows], own.expand(active, -1, -1)], 2)


def _extend(growing: list[Growing], logits: Tensor, columns: Columns, width: int) -> None:
    """Extend every proposal by its rows of ``logits`` [texts, rows, columns]. A row without numbers
    has no candidates.
    """
    places = [
        (text, row, _place(one, path))
        for text, one in enumerate(growing)
        for row, path in enumerate(one.paths)
    ]
    if not places:
        return
    at = torch.tensor([(text, row) for text, row, _ in places], device=logits.device)
    flat = logits[at[:, 0], at[:, 1]]
    sound = flat.amax(1).isfinite()
    if not sound.all():
        flat = flat.masked_fill(~sound[:, None], 0.0)
    most = min(CANDIDATES, max(one.turn.nodes for one in growing))
    found = iter(candidates(flat, [place for _, _, place in places], most, columns))
    numbers = iter(sound.tolist())
    for one in growing:
        own = [ones if next(numbers) else [] for ones in [next(found) for _ in one.paths]]
        one.extend(own, columns, width)


def _place(one: Growing, path: _Path) -> Row:
    place = Row.of(one.turn.sequence, None)
    return place.after(path.tokens) if path.tokens else place


def _going_on(growing: list[Growing], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return by text the rows that its paths come from, and their last tokens, int64[texts, width].
    A text with fewer paths has its first row again, which nothing reads.
    """
    rows = np.zeros((len(growing), width), np.int64)
    tokens = np.zeros((len(growing), width), np.int64)
    for text, one in enumerate(growing):
        for column, path in enumerate(one.paths):
            rows[text, column], tokens[text, column] = path.row, path.tokens[-1]
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)


class _TextRows:
    """The rows of texts that proposals attend to: ``count`` columns, those that a text lacks at the
    end.
    """

    def __init__(self, growing: list[Growing], window: int, device: torch.device) -> None:
        ends = np.array([one.end for one in growing])
        first = np.maximum(1, ends - window + 1) if window else np.ones_like(ends)
        self.count = int((ends - first).max())
        places = first[:, None] + np.arange(self.count)
        is_there = places < ends[:, None]
        blocks = np.full((len(growing), max(len(one.blocks) for one in growing)), -1)
        for text, one in enumerate(growing):
            blocks[text, : len(one.blocks)] = one.blocks
        row, inside = np.arange(len(growing))[:, None], np.minimum(places, ends[:, None] - 1)
        slots = blocks[row, inside // BLOCK_TOKENS] * BLOCK_TOKENS + inside % BLOCK_TOKENS
        slots[~is_there] = -1
        self.slots = torch.from_numpy(slots).to(device)
        self.ends = torch.from_numpy(ends[:, None]).to(device)
        self._is_there = torch.from_numpy(is_there).to(device)
        self._places = torch.from_numpy(places).to(device)
        self._window = window

    def seen(self, texts: int, depth: int) -> Tensor:
        """Return which columns the rows at a depth see, bool[texts, count]."""
        is_there = self._is_there[:texts]
        if not self._window:
            return is_there
        return is_there & (self._places[:texts] > self.ends[:texts] + depth - self._window)
