"""The layout of the rows of a pass: chunks as the sequences that paged attention is called with.

Rows of one token go through another kernel of it than longer runs, in other bits. So that a text is
the same bits under any plan, every generated token, proposed ones too, is a sequence of its own
that shares its row's block table, as it would be in plain decoding, and a prompt is runs of two
tokens or more. A call writes all its KV before it attends.

With fewer sequences in a call than threads, none of them a run, attention cuts contexts among the
threads, in other bits again. Such a call has a run of two rows more, of padding.

A run of several tokens clears what lies after it in its last block. In a prompt that may be the KV
of others, which share its blocks because they begin alike. So a prompt's run has a copy of that
block, whose tokens go back after the call, and what follows a prompt there waits for a second call
(``in_calls``).

A branch of a tree would overwrite the KV of the likeliest path, for both have the same positions:
it has copies of the blocks after the text. KV that other rows of the pass write there is written
into the copies, too (``expand`` repeats these rows in front of attention, ``compress`` drops them
afterwards).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from backend.engines.openvino.width import PassWidth
from backend.engines.stepping.chunks import PassChunk
from backend.sequence import BLOCK_TOKENS, ROOT

Blocks = npt.NDArray[np.int32]  # [blocks]

SCRATCH_TOKENS = 128 * 32
"""KV besides the ledger's: copies of prompts' last blocks and of branches."""


class Layout:
    """The inputs of one pass."""

    def __init__(
        self,
        chunks: Seq[PassChunk],
        copies: Iterable[int],
        branches: Iterator[int],
        *,
        invariant: bool,
    ) -> None:
        """Lay out chunks. ``copies`` are blocks for copies that go back after the call,
        ``branches`` those for branches, which are kept until the next pass. ``invariant``: as in
        the module's docstring; else chunks that follow each other run together.
        """
        self.copies: list[tuple[int, int, int]] = []
        """(From block, to block, tokens) to be copied before the pass."""
        self.returns: list[tuple[int, int, slice]] = []
        """(From block, to block, slice of tokens) to be copied after it."""
        self.branches: dict[tuple[int, int], Blocks] = {}
        """Tables with a node's path, by number of chunk and node off the likeliest path."""
        self.longest = 0
        """The longest context."""
        self._invariant = invariant
        self._for_copies, self._for_branches = iter(copies), branches
        self._ids: list[int] = []
        self._rows: list[int] = []
        self._expand: list[int] = []
        self._positions: list[int] = []
        self._past: list[int] = []
        self._begins = [0]
        self._tables: list[Blocks] = []
        for number, chunk in enumerate(chunks):
            if len(chunk.tokens) == 1:
                self._add_row(chunk)
            else:
                self._add(number, chunk)

    def fill(self, rows: PassWidth, attended: PassWidth, padding: Blocks, threads: int) -> None:
        """Add rows of padding, whose KV is in a block of no text: as many as the pass and
        its attention are to have, and those that keep attention whole on this many ``threads``.
        """
        for row in range(len(self._ids), rows.of(len(self._ids))):
            self._ids.append(0)
            self._run([row], 0, padding, 1)
        for _ in range(len(self._expand), attended.of(len(self._expand))):
            self._run([0], 0, padding, 1)
        if self._invariant and len(self._past) < threads and len(self._past) == len(self._expand):
            self._run([0, 0], 0, padding, 2)

    def inputs(self, *, repeats: bool) -> dict[str, Seq[int] | Blocks]:
        """Return the inputs of ``ConvertedGraph`` by name, but for ``max_context_len``."""
        inputs: dict[str, Seq[int] | Blocks] = {
            "ids": self._ids,
            "positions": self._positions,
            "rows": self._rows,
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": np.concatenate(self._tables),
            "block_indices_begins": [0, *accumulate(map(len, self._tables))],
        }
        if repeats:
            inputs["expand"] = self._expand
            # A row's output is that of its first place; without branches it has no other.
            inputs["compress"] = (
                np.unique(self._expand, return_index=True)[1]
                if self.branches
                else range(len(self._ids))
            )
        return inputs

    def _add_row(self, chunk: PassChunk) -> None:
        """Lay out a chunk of one row, which most chunks are: what ``_add`` does for it."""
        start = chunk.start
        if chunk.logits:
            self._rows.append(len(self._ids))
        self._expand.append(len(self._ids))
        self._ids += chunk.tokens
        self._positions.append(start)
        self._past.append(start)
        self._begins.append(len(self._expand))
        self._tables.append(chunk.table.numbers[: start // BLOCK_TOKENS + 1])
        self.longest = max(self.longest, start + 1)

    def _add(self, number: int, chunk: PassChunk) -> None:
        base, count = len(self._ids), len(chunk.tokens)
        self._ids += chunk.tokens
        self._rows += range(base + count - chunk.logits, base + count)
        root, table = base + count - len(chunk.parents), chunk.table.numbers
        main, *others = paths(chunk.parents) if chunk.parents else [[]]
        rows = [*range(base, root), *[root + node for node in main]]
        together = chunk.prompt_rows if self._invariant else len(rows)
        if needs_copy(chunk, together):
            table = self._copy_last_block(chunk, together)
        self._run(rows, chunk.start, table, together)
        for path in others:
            branch = [*range(base, root), *[root + node for node in path]]
            table = self._branch(chunk, branch, len(path))
            for node in path:
                if node not in main:
                    self.branches.setdefault((number, node), table)

    def _copy_last_block(self, chunk: PassChunk, together: int) -> Blocks:
        """Return a chunk's table with a copy of the block in which its run ends."""
        index, stop = divmod(chunk.start + together, BLOCK_TOKENS)
        begin = max(0, chunk.start - index * BLOCK_TOKENS)
        table, block = chunk.table.numbers.copy(), int(chunk.table.numbers[index])
        table[index] = copy = next(self._for_copies)
        if begin:
            self.copies.append((block, copy, begin))
        self.returns.append((copy, block, slice(begin, stop)))
        return table

    def _branch(self, chunk: PassChunk, rows: list[int], nodes: int) -> Blocks:
        """Lay out a path that is not the likeliest, in blocks of its own after the text; return
        its table.
        """
        end = chunk.start + len(rows) - nodes
        first, stop = end // BLOCK_TOKENS, -(-(chunk.start + len(rows)) // BLOCK_TOKENS)
        table = chunk.table.numbers[:stop].copy()
        for index in range(first, stop):
            table[index] = next(self._for_branches)
        begin = first * BLOCK_TOKENS
        if chunk.start > begin:
            source = int(chunk.table.numbers[first])
            self.copies.append((source, int(table[first]), chunk.start - begin))
        skipped = max(0, begin - chunk.start)
        together = 0 if self._invariant else len(rows) - skipped
        self._run(rows[skipped:], chunk.start + skipped, table, together)
        return table

    def _run(self, rows: list[int], start: int, table: Blocks, together: int) -> None:
        """Lay out rows that follow each other from position ``start`` on: the first ``together`` as
        one sequence, the others one by one.
        """
        first, end = len(self._expand) - start, start + len(rows)
        self._expand += rows
        self._positions += range(start, end)
        self.longest = max(self.longest, end)
        begin = start
        for stop in range(start + (together or 1), end + 1):
            self._past.append(begin)
            self._begins.append(first + stop)
            self._tables.append(table[: -(-stop // BLOCK_TOKENS)])
            begin = stop


def needs_copy(chunk: PassChunk, together: int) -> bool:
    """Return whether the run of a chunk's first rows ends within a block that others may share."""
    if not chunk.prompt_rows or together < 2:
        return False
    return (chunk.start + together) % BLOCK_TOKENS > 0


def in_calls(
    chunks: Seq[PassChunk], most_copies: int, *, invariant: bool
) -> list[list[tuple[int, PassChunk]]]:
    """Return the chunks, with their numbers, by the call in which they are run: what follows a
    prompt in the block where it ends is cut off for a later one, and none has more runs that need a
    copy than ``most_copies``.
    """
    if not any(chunk.prompt_rows for chunk in chunks):
        return [list(enumerate(chunks))]
    calls: list[list[tuple[int, PassChunk]]] = [[]]
    copies = [0]

    def place(number: int, chunk: PassChunk, earliest: int) -> int:
        together = chunk.prompt_rows if invariant else len(chunk.tokens)
        copied = needs_copy(chunk, together)
        while copied and copies[earliest] == most_copies:
            earliest += 1
            if earliest == len(calls):
                calls.append([])
                copies.append(0)
        calls[earliest].append((number, chunk))
        copies[earliest] += copied
        return earliest

    for number, chunk in enumerate(chunks):
        after = len(chunk.tokens) - chunk.prompt_rows
        if not (invariant and after and needs_copy(chunk, chunk.prompt_rows)):
            place(number, chunk, 0)
            continue
        prompt, rest = _cut(chunk, after)
        later = place(number, prompt, 0) + 1
        if later == len(calls):
            calls.append([])
            copies.append(0)
        place(number, rest, later)
    return calls


def _cut(chunk: PassChunk, after: int) -> tuple[PassChunk, PassChunk]:
    """Return the rows of a prompt, and those ``after``."""
    rows, logits = chunk.prompt_rows, max(0, chunk.logits - after)
    prompt = replace(chunk, tokens=chunk.tokens[:rows], logits=logits, parents=())
    rest = replace(
        chunk,
        tokens=chunk.tokens[rows:],
        start=chunk.start + rows,
        logits=chunk.logits - logits,
        prompt_rows=0,
    )
    return prompt, rest


def paths(parents: Seq[int]) -> list[list[int]]:
    """Return a tree's paths from the text to its leaves, the longest first."""
    all_paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        all_paths.append([*all_paths[parent], node] if parent != ROOT else [node])
    inner = set(parents)
    to_leaves = [path for node, path in enumerate(all_paths) if node not in inner]
    return sorted(to_leaves, key=len, reverse=True)
