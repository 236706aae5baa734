"""Passes of a paged decoder for the step engine: chunks in, logits out, by CUDA graphs where the
device has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from backend.engines.cuda.ancestors import MAX_NEW_TOKENS, ancestor_words
from backend.engines.cuda.columns import Columns, Shapes, to_device
from backend.engines.cuda.graphs import capture
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import PAGE, Layout
from backend.engines.cuda.prompts import Prompts
from backend.engines.stepping.chunks import Chunk, logit_rows, moves

logger = logging.getLogger(__name__)

ROW_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKEN_SIZES = (*ROW_SIZES, 320, 384, 512, 640, 768, 1024)
MOST_SIZES = (1, 2, 4, 8, 16, 32, MAX_NEW_TOKENS)
KEY_SIZES = tuple(1 << n for n in range(10, 21))
"""Sizes of graphs: rows, tokens, the most new tokens of a row, and the most keys of one."""


def most_graph_tokens(rows: int, length: int) -> int:
    """Return the tokens of the largest pass that is captured, where each of ``rows`` verifies
    ``length`` tokens.
    """
    tokens = rows * (1 + length)
    return next((size for size in TOKEN_SIZES if size >= tokens), TOKEN_SIZES[-1])


class Size(NamedTuple):
    """The capacity of a graph."""

    rows: int
    tokens: int
    most: int
    keys: int

    @property
    def shapes(self) -> Shapes:
        """The columns of a pass."""
        long, short = (np.int64, (self.tokens,)), (np.int32, (self.tokens,))
        return {
            "ids": long,
            "position": long,
            "ancestors": long,
            "place": short,
            "first": (np.int32, (self.rows + 1,)),
            "start": (np.int32, (self.rows,)),
            "table": (np.int32, (self.rows, -(-self.keys // PAGE))),
        }


class Inputs(Columns):
    """The columns that a pass reads."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__(size.shapes, device)
        self.size = size

    def layout(self, spans: list[tuple[int, int]] | None = None) -> Layout:
        """Return what attention reads. ``spans`` are the committed and new tokens of each row of a
        pass of prompts.
        """
        columns = self.device
        prompts = None if spans is None else Prompts(spans, columns["table"], columns["first"])
        return Layout(
            columns["table"],
            columns["start"],
            columns["first"],
            columns["ancestors"],
            columns["place"],
            self.size.most,
            self.size.keys,
            prompts,
        )


class Graph(NamedTuple):
    """A captured pass: what it reads, and its replay, which returns logits [tokens, vocab] and
    states [tokens, taps, hidden].
    """

    inputs: Inputs
    replay: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class PagedForward:
    """``stepping.engine.Model`` over a paged decoder. Its last page belongs to no sequence.

    Graphs have at most ``graph_tokens`` tokens. ``count(reason)`` is called when one cannot be
    captured; its size then runs without.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        graph_tokens: int = TOKEN_SIZES[-1],
        count: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.device = model, model.device
        self.token_ids: torch.Tensor | None = None
        self.taps = model.taps
        self.hidden_states: torch.Tensor | None = None
        self._count, self._graph_tokens = count, graph_tokens
        self._outputs: dict[str, torch.Tensor] = {}
        self._scratch = len(model.kv[0]) - 1
        self._graphs: dict[Size, Graph | None] = {}
        self._captures = self.device.type == "cuda"

    @property
    def kv(self) -> list[torch.Tensor]:
        """Keys and values by layer, without the page that no sequence has."""
        return [kv[: self._scratch] for kv in self.model.kv]

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run the chunks (``Model.forward``): prompts first, then all others in one pass."""
        is_long = [len(chunk.tokens) > MAX_NEW_TOKENS for chunk in chunks]
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for wants_long in (True, False):
            own = [chunk for chunk, long in zip(chunks, is_long, strict=True) if long == wants_long]
            if own:
                parts.append(self._run(own, captured=self._captures and not wants_long))
        if len(parts) == 1:
            logits, self.hidden_states = parts[0]
            return logits
        self.hidden_states = None
        if parts[0][1] is not None:
            order = self._order([len(chunk.tokens) for chunk in chunks], is_long)
            self.hidden_states = torch.cat([s for _, s in parts if s is not None])[order]
        order = self._order([chunk.logits for chunk in chunks], is_long)
        return torch.cat([logits for logits, _ in parts])[order]

    def keep(self, accepted: Sequence[tuple[Chunk, Sequence[int]]]) -> None:
        """Move the KV of accepted nodes to where their tokens are in the text (``Model.keep``)."""
        sources, targets = moves(accepted)
        if len(sources):
            (block, offset), (to_block, to_offset) = (
                (slots // PAGE, slots % PAGE) for slots in (sources, targets)
            )
            for kv in self.model.kv:
                kv[to_block, :, :, to_offset] = kv[block, :, :, offset]

    def _run(
        self, chunks: Sequence[Chunk], *, captured: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [wanted, vocab] and states [tokens, taps, hidden] of one pass."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        keys = max(chunk.start + n for chunk, n in zip(chunks, lengths, strict=True))
        exact = Size(len(chunks), sum(lengths), max(lengths), keys)
        wanted = to_device(logit_rows(chunks), torch.int64, self.device)
        if captured and (graph := self._graph(exact)) is not None:
            self._fill(graph.inputs, chunks)
            graph.inputs.send()
            logits, states = graph.replay()
            return logits[wanted], None if states is None else states[: exact.tokens]
        inputs = Inputs(exact, self.device)
        self._fill(inputs, chunks)
        inputs.send()
        is_long = exact.most > MAX_NEW_TOKENS
        spans = [(chunk.start, n) for chunk, n in zip(chunks, lengths, strict=True)]
        logits = self._pass(inputs, wanted, spans if is_long else None)
        return logits, self.model.states

    def _pass(
        self,
        inputs: Inputs,
        wanted: torch.Tensor | None,
        spans: list[tuple[int, int]] | None = None,
    ) -> torch.Tensor:
        columns = inputs.device
        return self.model.run(columns["ids"], columns["position"], inputs.layout(spans), wanted)

    def _fill(self, inputs: Inputs, chunks: Sequence[Chunk]) -> None:
        """Write a pass's columns; the rows and tokens left over belong to no sequence."""
        host, at = inputs.host, 0
        host["place"].fill(self._scratch * PAGE)
        host["ids"].fill(0)
        host["position"].fill(0)
        host["start"].fill(0)
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

    def _graph(self, exact: Size) -> Graph | None:
        """Return the graph that a pass runs in, captured at first use; None where there is none."""
        sizes = (ROW_SIZES, TOKEN_SIZES, MOST_SIZES, KEY_SIZES)
        fitting = [
            next((size for size in known if size >= value), None)
            for known, value in zip(sizes, exact, strict=True)
        ]
        if None in fitting:
            return None
        size = Size(*fitting)  # type: ignore[arg-type]
        if size.tokens > self._graph_tokens:
            return None
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def _capture(self, size: Size) -> Graph | None:
        inputs = Inputs(size, self.device)
        inputs.host["place"].fill(self._scratch * PAGE)
        inputs.send()

        def run() -> tuple[torch.Tensor, torch.Tensor | None]:
            logits = self._shared("logits", self._pass(inputs, None))
            states = self.model.states
            return logits, None if states is None else self._shared("states", states)

        try:
            return Graph(inputs, self._record(run))
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("no CUDA graph for %s: %s", size, error)
            if self._count is not None:
                self._count("cuda_graph")
            return None

    def _shared(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """Copy what a graph returns to where all graphs leave it: else each would keep its own."""
        if name not in self._outputs:
            shape = self._graph_tokens, *output.shape[1:]
            self._outputs[name] = output.new_empty(shape)
        return self._outputs[name][: len(output)].copy_(output)

    def _record(
        self, run: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
        """Capture a pass in a CUDA graph and return its replay. Raises RuntimeError."""
        outputs, launch = capture(self.device, run)

        def replay() -> tuple[torch.Tensor, torch.Tensor | None]:
            launch()
            return outputs

        return replay

    def _order(self, counts: Sequence[int], is_long: Sequence[bool]) -> torch.Tensor:
        """Return where each chunk's rows (``counts``) lie when those of long ones come first."""
        at = [0, sum(count for count, long in zip(counts, is_long, strict=True) if long)]
        order: list[int] = []
        for count, long in zip(counts, is_long, strict=True):
            begin = at[0 if long else 1]
            at[0 if long else 1] += count
            order += range(begin, begin + count)
        return to_device(order, torch.int64, self.device)
