"""Drafts by a published EAGLE-3 head, whose KV has the target's block tables.

Row p (``model``) lies at place p, as the target's does, so a block's keys and values depend on the
tokens up to its end, and the ledger's keys name them. A row after a block needs the fused state of
the block's last token: ``EagleEngine._ends`` has it, for every sequence that shares the block.

Only texts have rows in blocks. A proposal is computed apart from them, so nothing is rolled back:
a tree that grows by one depth a pass, for a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backend.engines.eagle.folder import EagleShape
from backend.engines.port import EngineLimits, HiddenStates, Turn
from backend.engines.proposer import Proposer
from backend.engines.spine import CANDIDATES
from backend.engines.stepping.kv_caches import Cache, Caches
from backend.sampling.distributions import Floats
from backend.sampling.draw import IntArray
from backend.sampling.processing import Columns
from backend.sampling.verification import VerifyRequest, candidates
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from policy.evidence import PAST_TRAINED

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a head, each of a token and of the fused state before it."""

    tokens: IntArray
    """[n]"""
    hidden: Floats
    """[n, hidden]"""
    positions: IntArray
    """[n]"""


class EagleModel(Protocol):
    """The forward of a head (``folder`` has its formula), many rows at a time, with the keys and
    values of texts, where it runs. The next call may overwrite what it returns.
    """

    shape: EagleShape
    token_ids: IntArray
    """[draft vocabulary]: the tokens that its logits are of."""

    def fuse(self, states: Floats) -> Floats:
        """Return the fused states [n, hidden] of the target's [n, layers, target_hidden]."""
        ...

    def write(self, rows: HeadRows, slots: IntArray) -> None:
        """Write the keys and values of texts' rows into ``slots[n]``."""
        ...

    def begin(self, slots: IntArray, most: int) -> None:
        """Begin proposals of at most ``most`` rows each, for texts with rows in
        ``slots[texts, columns]``; those in slot -1 are zeros.
        """
        ...

    def run(self, rows: HeadRows, mask: Flags) -> tuple[Floats, Floats]:
        """Run the next rows of the first texts, which see the columns in
        ``mask[texts, rows, columns]``: the text's, those of drafted rows before, and their own.
        Return the logits [n, draft vocabulary], and the states [n, hidden] that children of the
        rows go on from.
        """
        ...


@dataclass(slots=True)
class _Text:
    """The engine's record of a sequence. ``cache.ran`` are the tokens whose states it has seen: all
    but the first have a row.
    """

    sequence: Sequence
    cache: Cache
    state: Floats | None = None
    """[hidden], fused, of the last of them."""
    has_hole: bool = False
    """States are missing from its text: it gets no proposals."""


@dataclass(slots=True)
class _Places:
    """Sources and destinations of the rows of new tokens, for all texts together.

    ``before``, ``ends`` and ``last`` are places in a table of fused states: those of the
    ``states_before`` texts that had states before, then those of the new tokens.
    """

    states: int
    """Places of the table that are taken."""
    states_before: int = 0
    """Texts so far that had states before."""
    tokens: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """The state of the token before each of ``tokens``."""
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """The blocks that are complete now."""
    ends: list[int] = field(default_factory=list)
    """The state of the last token of each of ``blocks``."""
    last: list[int] = field(default_factory=list)
    """The state of each text's last token that has one."""

    def add(self, text: _Text, end: int) -> None:
        """Add a text whose tokens up to ``end`` have states."""
        ran, numbers = len(text.cache.ran), text.cache.blocks
        if text.state is not None:
            self.before.append(self.states_before)
            self.states_before += 1
        new = range(max(ran, 1), end)  # the first token of a text has no row
        self.before += range(self.states, self.states + end - ran - 1)
        self.tokens += text.sequence.tokens[new.start : end]
        self.positions += new
        self.slots += [numbers[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in new]
        for block in range(ran // BLOCK_TOKENS, end // BLOCK_TOKENS):
            self.blocks.append(numbers[block])
            self.ends.append(self.states + (block + 1) * BLOCK_TOKENS - 1 - ran)
        self.states += end - ran
        self.last.append(self.states - 1)


class EagleEngine(Proposer):
    """A draft that reads the target's hidden states (``port.ReadsTarget``)."""

    def __init__(
        self,
        name: str,
        model: EagleModel,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int,
        width: int = 1,
        count: Callable[..., None] | None = None,
    ) -> None:
        """``width``: the likeliest paths that a proposal goes on with at each depth; ``count`` is
        that of ``Service``.
        """
        self._model, self._width, self._count = model, width, count
        shape, most = model.shape, (max_draft_tokens, max_draft_tokens)
        limits = EngineLimits(shape.vocab_size, max_context_tokens, *most, kv_blocks=kv_blocks)
        super().__init__(name, limits)
        self._columns = Columns(model.token_ids)
        self._caches = Caches(name, kv_blocks)
        self._texts: dict[int, _Text] = {}
        self._ends = np.zeros((kv_blocks, shape.hidden_size), np.float32)
        """[blocks, hidden]: the fused state of each complete block's last token."""

    # -- the target's states

    def absorb(self, states: Seq[tuple[Sequence, HiddenStates]]) -> None:
        """Write the rows of the texts' new tokens (``port.ReadsTarget``)."""
        new = [part for one in states if (part := self._new_part(*one)) is not None]
        if new:
            self._write(new)

    def _new_part(
        self, sequence: Sequence, states: HiddenStates
    ) -> tuple[_Text, int, Floats] | None:
        """Return a sequence, the end of its tokens that have states, and those of its new tokens
        [new, layers, hidden]; None where nothing is new, or something is missing before it.
        """
        text = self._text(sequence)
        ran, end = len(text.cache.ran), min(states.end, len(sequence.tokens))
        if states.first > ran and not text.has_hole:
            text.has_hole = True
            if self._count is not None:
                self._count("spindle_draft_holes_total", draft=self.name)
        if text.has_hole or end <= ran:
            return None
        rows = states.of(self._model.shape.layers)
        return text, end, rows[ran - states.first : end - states.first]

    def _text(self, sequence: Sequence) -> _Text:
        text = self._texts.get(sequence.id)
        if text is None:
            for other in self._texts.values():  # what the new one may share
                self._caches.matching_in(other.cache, other.sequence)
        cache = self._caches.of(sequence)
        if text is not None and text.cache is cache:
            text.sequence = sequence  # it may be another record of the same text
            return text
        text = self._texts[sequence.id] = _Text(sequence, cache)
        if cache.ran:
            text.state = self._ends[cache.blocks[len(cache.ran) // BLOCK_TOKENS - 1]]
        return text

    def _write(self, new: list[tuple[_Text, int, Floats]]) -> None:
        """Fuse the states [n, layers, target_hidden] of each text's new tokens, and write the rows
        that they allow.
        """
        states = np.concatenate([rows for _, _, rows in new])
        earlier = [text.state[None] for text, _, _ in new if text.state is not None]
        table = np.concatenate([*earlier, self._model.fuse(states)])
        places = _Places(states=len(earlier))
        for text, end, _ in new:
            places.add(text, end)
        if places.tokens:
            tokens, positions = np.array(places.tokens), np.array(places.positions)
            rows = HeadRows(tokens, table[places.before], positions)
            self._model.write(rows, np.array(places.slots))
        self._ends[places.blocks] = table[places.ends]
        for (text, end, _), state in zip(new, table[places.last], strict=True):
            text.state = state
            text.cache.ran += text.sequence.tokens[len(text.cache.ran) : end]
            text.cache.agreed = end

    # -- proposals

    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        trees: list[ProposalTree] = []
        for turn in turns:
            text = self._texts[turn.sequence.id]
            assert text.state is not None
            trees.append(ProposalTree(turn, text.cache.blocks, text.state))
        grow(trees, self._model, self._columns, self._width)
        return [Proposal.best(self.name, tree.nodes, tree.turn.nodes) for tree in trees]

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; their blocks may still be shared."""
        for sequence_id in sequence_ids:
            text = self._texts.pop(sequence_id, None)
            if text is not None:
                self._caches.matching_in(text.cache, text.sequence)
        self._caches.forget(sequence_ids)

    def _missing(self, sequence: Sequence) -> str:
        text, tokens = self._texts.get(sequence.id), len(sequence.tokens)
        if text is None or text.has_hole or not 0 < len(text.cache.ran) == tokens - 1:
            return f"the target has not given the states of all its {tokens} tokens"
        return ""

    def holes(self) -> int:
        """Return how many texts have states missing (``port.MissesStates``)."""
        return sum(text.has_hole for text in list(self._texts.values()))

    def evidence(self, sequence: Sequence) -> int:
        """Return ``PAST_TRAINED`` for a text that is longer than those it was trained on, where
        less of what such heads propose is accepted (``port.ShowsEvidence``).
        """
        is_past = len(sequence.tokens) > self._model.shape.trained_tokens
        return PAST_TRAINED if is_past else 0

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """For measuring only: take all states as absorbed."""
        del tokens
        text = self._text(sequence)
        text.cache.ran, text.cache.agreed = sequence.tokens[:-1], 0
        text.state = np.zeros_like(self._ends[0])

    def close(self) -> None:
        """Forget everything; the engine is of no use afterwards."""
        super().close()
        self._texts.clear()
        self._caches.clear()
        del self._model, self._ends


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
    state: Floats
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
        longer = []
        for row, (path, ones) in enumerate(zip(self.paths, by_path, strict=True)):
            for column, confidence in ones:
                token = columns.token(column)
                node, whole = len(self.nodes), path.confidence * confidence
                self.nodes.append((token, path.node, whole))
                longer.append(_Path(node, (*path.tokens, token), whole, row))
        self.paths = sorted(longer, key=lambda path: -path.confidence)[:width]


def grow(trees: list[ProposalTree], model: EagleModel, columns: Columns, width: int) -> None:
    """Grow proposals to the length that their turns ask for."""
    trees = sorted(trees, key=lambda tree: -tree.turn.run)  # those that end come last
    deepest = trees[0].turn.run
    text = _TextRows(trees, model.shape.sliding_window)
    model.begin(text.slots, 1 + (deepest - 1) * width)
    tokens = np.array([[tree.turn.sequence.tokens[-1]] for tree in trees])
    hidden = np.stack([tree.state for tree in trees])[:, None]
    lineage = np.ones((len(trees), 1, 1), np.bool_)
    for depth in range(deepest):
        active = sum(tree.turn.run > depth for tree in trees)
        tokens, hidden, lineage = tokens[:active], hidden[:active], lineage[:active]
        is_visible = text.visible(active, depth)[:, None].repeat(tokens.shape[1], 1)
        positions = (text.ends[:active] + depth).repeat(tokens.shape[1], 1)
        rows = HeadRows(tokens.ravel(), hidden.reshape(tokens.size, -1), positions.ravel())
        logits, carried = model.run(rows, np.concatenate([is_visible, lineage], 2))
        _extend(trees[:active], logits.reshape(*tokens.shape, -1), columns, width)
        if depth + 1 < deepest:
            parents, picks = _going_on(trees[:active], width)
            texts = np.arange(active)[:, None]
            hidden = carried.reshape(*tokens.shape, -1)[texts, parents]
            itself = np.eye(width, dtype=np.bool_)[None].repeat(active, 0)
            tokens, lineage = picks, np.concatenate([lineage[texts, parents], itself], 2)


def _extend(trees: list[ProposalTree], logits: Floats, columns: Columns, width: int) -> None:
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
    flat = logits[[text for text, _, _ in places], [row for _, row, _ in places]]
    is_finite = np.isfinite(flat.max(1))
    flat[~is_finite] = 0.0
    most = min(CANDIDATES, max(tree.turn.nodes for tree in trees))
    by_row = iter(candidates(flat, [place for _, _, place in places], most, columns))
    finite = iter(is_finite.tolist())
    for tree in trees:
        by_path = [ones if next(finite) else [] for ones in [next(by_row) for _ in tree.paths]]
        tree.extend(by_path, columns, width)


def _place(tree: ProposalTree, path: _Path) -> VerifyRequest:
    place = VerifyRequest.of(tree.turn.sequence, None)
    return place.after(path.tokens) if path.tokens else place


def _going_on(trees: list[ProposalTree], width: int) -> tuple[IntArray, IntArray]:
    """Return by text the rows that its paths come from, and their last tokens, int64[texts, width].
    A text with fewer paths has its first row again, which nothing reads.
    """
    rows = np.zeros((len(trees), width), np.int64)
    tokens = np.zeros((len(trees), width), np.int64)
    for text, tree in enumerate(trees):
        for column, path in enumerate(tree.paths):
            rows[text, column], tokens[text, column] = path.row, path.tokens[-1]
    return rows, tokens


class _TextRows:
    """The rows of texts that proposals attend to: ``count`` columns, those that a text lacks at the
    end.
    """

    def __init__(self, trees: list[ProposalTree], window: int) -> None:
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
        self.slots, self.ends = slots, ends[:, None]
        self._is_there, self._places = is_there, places
        self._window = window

    def visible(self, texts: int, depth: int) -> Flags:
        """Return which columns the rows at a depth see, bool[texts, count]."""
        is_there: Flags = self._is_there[:texts]
        if self._window:
            first = self.ends[:texts] + depth - self._window + 1
            is_there = is_there & (self._places[:texts] >= first)
        return is_there
