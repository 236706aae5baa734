"""Passes of a paged decoder: for the step engine from chunks to logits, for steps on the device the
same passes. Those of decoding are captured in CUDA graphs, one for each number of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import MAX_NEW_TOKENS, PAGE, PassLayout, ancestor_words
from backend.engines.cuda.prompts import PromptPass
from backend.engines.cuda.stream import Graphs, PinnedColumns, to_device
from backend.engines.models.arrays import to_array
from backend.engines.stepping.chunks import PassChunk, logit_rows, moves
from backend.sampling.distributions import Floats

ROW_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKEN_SIZES = (*ROW_SIZES, 320, 384, 512, 640, 768, 1024)
"""Rows and tokens of captured passes."""


def size_of(sizes: Sequence[int], value: int) -> int | None:
    """Return the smallest of the sizes that has room; None where none has."""
    return next((size for size in sizes if size >= value), None)


def most_graph_tokens(rows: int, length: int) -> int:
    """Return the tokens of the largest pass that is captured, where each of ``rows`` verifies
    ``length`` tokens.
    """
    return size_of(TOKEN_SIZES, rows * (1 + length)) or TOKEN_SIZES[-1]


class Size(NamedTuple):
    """The size of a pass."""

    rows: int
    tokens: int


def sizes_of(rows: int, most: int) -> Iterator[Size]:
    """Yield the sizes of all passes in which up to ``rows`` rows have up to ``most`` tokens each,
    the largest first, so that the others' memory fits into its own.
    """
    last = size_of(ROW_SIZES, rows) or ROW_SIZES[-1]
    for count in [size for size in ROW_SIZES if size <= last][::-1]:
        end = size_of(TOKEN_SIZES, count * most) or TOKEN_SIZES[-1]
        yield from (Size(count, tokens) for tokens in TOKEN_SIZES[::-1] if count <= tokens <= end)


class Inputs(PinnedColumns):
    """The columns that a pass reads. A row has at most ``most`` new tokens."""

    def __init__(self, model: PagedModel, size: Size, most: int) -> None:
        long, short = (np.int64, (size.tokens,)), (np.int32, (size.tokens,))
        super().__init__(
            {
                "ids": long,
                "position": long,
                "ancestors": long,
                "place": short,
                "first": (np.int32, (size.rows + 1,)),
                "start": (np.int32, (size.rows,)),
                "table": (np.int32, (size.rows, model.row_pages)),
            },
            model.stream,
        )
        self.size, self._most, self._scratch = size, most, model.scratch

    def clear(self) -> None:
        """Leave no token to a sequence."""
        for column in self.device.values():
            column.zero_()
        self.device["place"].fill_(self._scratch)

    def layout(self, spans: list[tuple[int, int]] | None = None) -> PassLayout:
        """Return what attention reads. ``spans`` are the committed and new tokens of each row of a
        pass of prompts.
        """
        columns = self.device
        prompts = None if spans is None else PromptPass(spans, columns["table"], columns["first"])
        return PassLayout(
            columns["table"],
            columns["start"],
            columns["first"],
            columns["ancestors"],
            columns["place"],
            self._most,
            prompts,
        )

    def fill(self, chunks: Sequence[PassChunk]) -> None:
        """Send a pass's columns; the rows and tokens left over belong to no sequence."""
        host, at = self.host, 0
        host["place"].fill(self._scratch)
        for name in ("ids", "position", "start"):
            host[name].fill(0)
        for row, chunk in enumerate(chunks):
            count = len(chunk.tokens)
            end = at + count
            chain = count - len(chunk.parents)
            host["ids"][at:end] = chunk.tokens
            host["position"][at:end] = chunk.positions
            places = np.arange(chunk.start, chunk.start + count)
            blocks = chunk.table.numbers
            host["place"][at:end] = blocks[places // PAGE] * PAGE + places % PAGE
            if count <= MAX_NEW_TOKENS:
                tree = [parent + chain - 1 for parent in chunk.parents]
                host["ancestors"][at:end] = ancestor_words([*range(-1, chain - 2), *tree])
            host["first"][row] = at
            host["start"][row] = chunk.start
            pages = -(-(chunk.start + count) // PAGE)
            host["table"][row, :pages] = blocks[:pages]
            at = end
        host["first"][len(chunks) :] = at
        self.send()


class Outputs:
    """The results of passes of up to ``tokens`` tokens, in one place for all graphs."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._results: dict[str, torch.Tensor] = {}

    def leave(
        self,
        name: str,
        output: torch.Tensor,  # [tokens, ...]
    ) -> None:
        """Copy a result, one row for each token."""
        if name not in self._results:
            self._results[name] = output.new_empty(self.tokens, *output.shape[1:])
        self._results[name][: len(output)].copy_(output)

    def of(self, name: str, tokens: int) -> torch.Tensor | None:
        """Return the last pass's result of this name, if there was one."""
        values = self._results.get(name)
        return None if values is None else values[:tokens]


class DecodePass:
    """A pass of decoding: ``inputs``, and what it leaves of them in ``outputs``."""

    def __init__(
        self, model: PagedModel, size: Size, most: int, outputs: Outputs | None = None
    ) -> None:
        self.model, self.most = model, most
        self.inputs = Inputs(model, size, most)
        self._outputs = outputs or Outputs(size.tokens)
        self.launch: Callable[[], object] = self.run

    def run(self) -> None:
        """Launch it without a graph."""
        columns = self.inputs.device
        logits = self.model.run(columns["ids"], columns["position"], self.inputs.layout())
        self._outputs.leave("logits", logits)
        if self.model.states is not None:
            self._outputs.leave("states", self.model.states)

    @property
    def logits(self) -> torch.Tensor:
        """[tokens, vocab], void as soon as another pass runs."""
        logits = self._outputs.of("logits", self.inputs.size.tokens)
        assert logits is not None
        return logits

    @property
    def states(self) -> torch.Tensor | None:
        """[tokens, taps, hidden], likewise; None without taps."""
        return self._outputs.of("states", self.inputs.size.tokens)


class PagedForward:
    """``stepping.engine.Model`` over a paged decoder. Its last page belongs to no sequence.

    Passes are captured in which each row has at most ``most`` new tokens, and all have at most
    ``graph_tokens``. ``count(reason)`` is called when one cannot be captured; it then runs without.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        most: int = MAX_NEW_TOKENS,
        graph_tokens: int = TOKEN_SIZES[-1],
        count: Callable[[str], None] | None = None,
    ) -> None:
        self.paged, self.device = model, model.device
        self.token_ids: torch.Tensor | None = None
        self.taps = model.taps
        self.hidden_states: Floats | None = None
        self.graphs = Graphs(model.stream, "a pass of", count)
        self._most, self._graph_tokens = min(most, MAX_NEW_TOKENS), graph_tokens
        self._passes: dict[Size, DecodePass] = {}
        self._outputs = Outputs(graph_tokens)

    @property
    def kv(self) -> list[torch.Tensor]:
        """Keys and values by layer, without the page that no sequence has."""
        return [kv[:-1] for kv in self.paged.kv]

    def pass_of(self, size: Size) -> DecodePass:
        """Return a pass of decoding, captured where it is not yet and the device captures."""
        if size not in self._passes:
            outputs = self._outputs if size.tokens <= self._graph_tokens else None
            self._passes[size] = DecodePass(self.paged, size, self._most, outputs)
        new_pass = self._passes[size]
        new_pass.launch = self.graphs.of(size, new_pass.run, new_pass.inputs.clear)
        return new_pass

    def capture(self, rows: int) -> None:
        """Capture all passes of up to ``rows`` rows."""
        for size in sizes_of(rows, self._most):
            if size.tokens <= self._graph_tokens:
                self.pass_of(size)

    def forward(self, chunks: Sequence[PassChunk]) -> Floats:
        """Run the chunks, and wait for their results (``Model.forward``)."""
        logits, states = self.launch(chunks)
        self.hidden_states = None if states is None else to_array(states)
        return to_array(logits)

    def launch(self, chunks: Sequence[PassChunk]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the chunks, prompts first, then all others in one pass. Return the logits that they
        want [wanted, vocab] and their states [tokens, taps, hidden], void as soon as another pass
        runs.
        """
        is_long = [len(chunk.tokens) > self._longest(chunk) for chunk in chunks]
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for wants_long in (True, False):
            part = [
                chunk for chunk, long in zip(chunks, is_long, strict=True) if long == wants_long
            ]
            if part:
                parts.append(self._run(part, are_prompts=wants_long))
        if len(parts) == 1:
            return parts[0]
        states = None
        if parts[0][1] is not None:
            order = self._order([len(chunk.tokens) for chunk in chunks], is_long)
            states = torch.cat([s for _, s in parts if s is not None])[order]
        order = self._order([chunk.logits for chunk in chunks], is_long)
        return torch.cat([logits for logits, _ in parts])[order], states

    def keep(self, accepted: Sequence[tuple[PassChunk, Sequence[int]]]) -> None:
        """Move the KV of accepted nodes to where their tokens are in the text (``Model.keep``)."""
        sources, targets = (torch.from_numpy(slots).to(self.device) for slots in moves(accepted))
        if len(sources):
            (block, offset), (to_block, to_offset) = (
                (slots // PAGE, slots % PAGE) for slots in (sources, targets)
            )
            for kv in self.paged.kv:
                kv[to_block, :, :, to_offset] = kv[block, :, :, offset]

    def _run(
        self, chunks: Sequence[PassChunk], *, are_prompts: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [wanted, vocab] and states [tokens, taps, hidden] of one pass."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        tokens = sum(lengths)
        wanted = to_device(logit_rows(chunks), torch.int64, self.device)
        if (size := self._find_size(lengths)) is not None:
            captured = self.pass_of(size)
            captured.inputs.fill(chunks)
            captured.launch()
            states = captured.states
            return captured.logits[wanted], None if states is None else states[:tokens]
        inputs = Inputs(self.paged, Size(len(chunks), tokens), max(lengths))
        inputs.fill(chunks)
        spans = [(chunk.start, n) for chunk, n in zip(chunks, lengths, strict=True)]
        columns, layout = inputs.device, inputs.layout(spans if are_prompts else None)
        logits = self.paged.run(columns["ids"], columns["position"], layout, wanted)
        return logits, self.paged.states

    def _longest(self, chunk: PassChunk) -> int:
        """Return the new tokens up to which a chunk's attention is that of decoding."""
        return MAX_NEW_TOKENS if chunk.parents else self._most

    def _find_size(self, lengths: Sequence[int]) -> Size | None:
        """Return the size of the captured pass that rows of these lengths fit; None for none."""
        rows, tokens = size_of(ROW_SIZES, len(lengths)), size_of(TOKEN_SIZES, sum(lengths))
        if not self.graphs.captures or max(lengths) > self._most or rows is None or tokens is None:
            return None
        return Size(rows, max(rows, tokens)) if tokens <= self._graph_tokens else None

    def _order(self, counts: Sequence[int], is_long: Sequence[bool]) -> torch.Tensor:
        """Return where each chunk's rows (``counts``) lie when those of long ones come first."""
        at = [0, sum(count for count, long in zip(counts, is_long, strict=True) if long)]
        order: list[int] = []
        for count, long in zip(counts, is_long, strict=True):
            begin = at[0 if long else 1]
            at[0 if long else 1] += count
            order += range(begin, begin + count)
        return to_device(order, torch.int64, self.device)
