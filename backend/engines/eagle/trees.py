"""Proposals of an EAGLE-3 head: trees that grow by one depth a pass, for a whole batch at once."""

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
class ProposalTree:
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

    def extend(self, by_path: Seq[Seq[tuple[int, float]]], columns: Columns, width: int) -> None:
        """Add the candidates (column, confidence) after each path, and go on with the ``width``
        likeliest.
        """
        grown = []
        for row, (path, ones) in enumerate(zip(self.paths, by_path, strict=True)):
            for column, confidence in ones:
                token = columns.token(column)
                node, whole = len(self.nodes), path.confidence * confidence
                self.nodes.append((token, path.node, whole))
                grown.append(_Path(node, (*path.tokens, token), whole, row))
        self.paths = sorted(grown, key=lambda path: -path.confidence)[:width]


def grow(
    trees: list[ProposalTree], model: EagleModel, pool: Tensor, columns: Columns, width: int
) -> None:
    """Grow proposals to the length that their turns ask for. ``pool`` [slots, 2 kv_heads,
    head_dim] has the rows of the texts, and zeros in its last slot.
    """
    trees = sorted(trees, key=lambda tree: -tree.turn.run)  # those that end come last
    deepest = trees[0].turn.run
    text = _TextRows(trees, model.shape.sliding_window, model.device)
    scratch = 1 + (deepest - 1) * width
    key_values = pool.new_empty(len(trees), text.count + scratch, *pool.shape[1:])
    key_values[:, : text.count] = pool[text.slots]
    tokens = torch.tensor([[tree.turn.sequence.tokens[-1]] for tree in trees], device=model.device)
    hidden = torch.stack([tree.state for tree in trees])[:, None]
    lineage = torch.ones(len(trees), 1, 1, dtype=torch.bool, device=model.device)
    for depth in range(deepest):
        active = sum(tree.turn.run > depth for tree in trees)
        tokens, hidden, lineage = tokens[:active], hidden[:active], lineage[:active]
        seen = text.visible(active, depth)[:, None].expand(-1, tokens.shape[1], -1)
        mask = torch.cat([seen, lineage], 2)
        positions = (text.ends[:active] + depth).expand_as(tokens)
        keys = key_values[:active, : mask.shape[2]]
        logits, carried = model.rows(tokens, hidden, positions, keys, mask)
        _extend(trees[:active], logits, columns, width)
        if depth + 1 < deepest:
            rows, chosen = _going_on(trees[:active], width, model.device)
            texts = torch.arange(active, device=model.device)[:, None]
            tokens, hidden = chosen, carried[texts, rows]
            itself = torch.eye(width, dtype=torch.bool, device=model.device)
            lineage = torch.cat([lineage[texts, rows], itself.expand(active, -1, -1)], 2)


def _extend(trees: list[ProposalTree], logits: Tensor, columns: Columns, width: int) -> None:
    """Extend every proposal by its rows of ``logits`` [texts, rows, columns]. A row without numbers
    has no candidates.
    """
    places = [
        (text, row, _place(tree, path))
        for text, tree in enumerate(trees)
        for row, path in enumerate(tree.paths)
    ]
    if not places:
        return
    at = torch.tensor([(text, row) for text, row, _ in places], device=logits.device)
    flat = logits[at[:, 0], at[:, 1]]
    is_finite = flat.amax(1).isfinite()
    if not is_finite.all():
        flat = flat.masked_fill(~is_finite[:, None], 0.0)
    most = min(CANDIDATES, max(tree.turn.nodes for tree in trees))
    by_row = iter(candidates(flat, [place for _, _, place in places], most, columns))
    finite = iter(is_finite.tolist())
    for tree in trees:
        by_path = [ones if next(finite) else [] for ones in [next(by_row) for _ in tree.paths]]
        tree.extend(by_path, columns, width)


def _place(tree: ProposalTree, path: _Path) -> Row:
    place = Row.of(tree.turn.sequence, None)
    return place.after(path.tokens) if path.tokens else place


def _going_on(trees: list[ProposalTree], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return by text the rows that its paths come from, and their last tokens, int64[texts, width].
    A text with fewer paths has its first row again, which nothing reads.
    """
    rows = np.zeros((len(trees), width), np.int64)
    tokens = np.zeros((len(trees), width), np.int64)
    for text, tree in enumerate(trees):
        for column, path in enumerate(tree.paths):
            rows[text, column], tokens[text, column] = path.row, path.tokens[-1]
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)


class _TextRows:
    """The rows of texts that proposals attend to: ``count`` columns, those that a text lacks at the
    end.
    """

    def __init__(self, trees: list[ProposalTree], window: int, device: torch.device) -> None:
        ends = np.array([tree.end for tree in trees])
        first = np.maximum(1, ends - window + 1) if window else np.ones_like(ends)
        self.count = int((ends - first).max())
        places = first[:, None] + np.arange(self.count)
        is_there = places < ends[:, None]
        blocks = np.full((len(trees), max(len(tree.blocks) for tree in trees)), -1)
        for text, tree in enumerate(trees):
            blocks[text, : len(tree.blocks)] = tree.blocks
        row, inside = np.arange(len(trees))[:, None], np.minimum(places, ends[:, None] - 1)
        slots = blocks[row, inside // BLOCK_TOKENS] * BLOCK_TOKENS + inside % BLOCK_TOKENS
        slots[~is_there] = -1
        self.slots = torch.from_numpy(slots).to(device)
        self.ends = torch.from_numpy(ends[:, None]).to(device)
        self._is_there = torch.from_numpy(is_there).to(device)
        self._places = torch.from_numpy(places).to(device)
        self._window = window

    def visible(self, texts: int, depth: int) -> Tensor:
        """Return which columns the rows at a depth see, bool[texts, count]."""
        is_there = self._is_there[:texts]
        if not self._window:
            return is_there
        return is_there & (self._places[:texts] > self.ends[:texts] + depth - self._window)
