"""A compiled decoder with its KV pool, which runs passes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
from openvino import Type

from backend.engines.checkpoint import CheckpointError, widen
from backend.engines.models.spec import AttentionSpec
from backend.engines.openvino.converted import ConvertedGraph
from backend.engines.openvino.layout import SCRATCH_TOKENS, Blocks, Layout, in_calls
from backend.engines.openvino.paged_attention import OpenvinoVersionError
from backend.engines.openvino.parts import compile_graph
from backend.engines.openvino.width import PassWidth, price_of_change
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.machine import machine
from backend.sampling.distributions import FAINT, Floats
from backend.sequence import BLOCK_TOKENS

SCRATCH_BLOCKS = SCRATCH_TOKENS // BLOCK_TOKENS
"""Blocks for a pass's copies, of a prompt's last block and for branches of trees, and one for rows
of padding.
"""

RUN_COPIES = SCRATCH_BLOCKS // 2 - 1
"""The most prompts' copies of a call; half of the blocks are for branches."""

_STORED = {"fp32": "f32", "bf16": "bf16"}
"""OpenVINO's names of precisions."""


class PassError(RuntimeError):
    """A pass that left no logits."""


def most_branches(longest: int) -> int:
    """Return how many branches of trees a call has room for, of paths of this many nodes."""
    blocks_each = 1 + -(-longest // BLOCK_TOKENS)
    return SCRATCH_BLOCKS // 2 // blocks_each


class OpenvinoDecoder:
    """A compiled decoder with a KV pool of ``kv_blocks`` blocks.

    ``precision`` is that of activations and KV (``fp32``, ``bf16``). ``invariant``: logits are the
    same bits whatever else is in a pass (``layout``). ``repeats`` and ``taps`` are those of the
    graph; ``ranks``: it ranks columns; ``group`` is that of ``parts.compile_graph``. A pass
    has at least ``least_rows`` rows, where it ``repeats``.
    """

    def __init__(
        self,
        converted: ConvertedGraph,
        *,
        kv_blocks: int,
        precision: str = "fp32",
        threads: int = 1,
        invariant: bool = True,
        repeats: bool = True,
        ranks: bool = False,
        taps: Seq[int] = (),
        group: int | None = None,
        least_rows: int = 1,
    ) -> None:
        """Compile the graph. Raises CheckpointError for a precision that the processor lacks."""
        self.taps = tuple(taps)
        self.hidden_states: Floats | None = None
        self._invariant, self._threads, self._ranks = invariant, threads, ranks
        self._repeats = repeats
        self._ranked: Floats | None = None  # the logits whose best are known
        self._for_copies = range(kv_blocks, kv_blocks + RUN_COPIES)
        self._padding = np.array([kv_blocks + RUN_COPIES], np.int32)
        self._for_branches = range(kv_blocks + RUN_COPIES + 1, kv_blocks + SCRATCH_BLOCKS)
        self._branches: dict[tuple[int, int], Blocks] = {}
        check_precision(precision)
        self._is_half = precision == "bf16"
        self._compiled = compile_graph(converted.graph, _STORED[precision], threads, group)
        self._vocab = converted.vocab_size
        self._out = np.empty((0, self._vocab), np.float32)
        self._make_pools(converted.layers, kv_blocks + SCRATCH_BLOCKS)
        self._begin()
        self._widths = PassWidth(0), PassWidth(0)
        price = price_of_change(self._probe) if self._repeats else 0
        self._widths = (
            PassWidth(price, least_rows),
            PassWidth(price),
        )  # of the pass, and of its attention

    def _make_pools(self, layers: Seq[AttentionSpec], blocks: int) -> None:
        """Make KV of ``blocks`` blocks: one pool for all caches of the same shape."""
        names: dict[tuple[int, int], list[str]] = {}
        for layer in layers:
            for kind, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
                name = f"{kind}_cache.{layer.layer}"
                names.setdefault((layer.kv_heads, dim), []).append(name)
        self.pools = [
            _reserve([len(caches), blocks, count, BLOCK_TOKENS, dim], self._is_half)
            for (count, dim), caches in names.items()
        ]
        """KV by shape [caches, blocks, kv_heads, BLOCK_TOKENS, head_dim], bf16 as int16: keys and
        values of the first layer of that shape, then of the next.
        """
        self._caches = {
            name: cache
            for pool, group in zip(self.pools, names.values(), strict=True)
            for name, cache in zip(group, pool, strict=True)
        }

    def _copy(self, source: int, target: int, tokens: slice | int) -> None:
        """Copy the KV of tokens from one block to another, of all layers."""
        for pool in self.pools:
            pool[:, target, :, tokens] = pool[:, source, :, tokens]

    def _probe(self, rows: int) -> None:
        """Run a pass of padding."""
        chunk = PassChunk([0], 0, KVTable(self._padding.tolist()), 0)
        self._call([(0, chunk)] * rows, (), iter(()))

    def seen_none(self) -> None:
        """For measuring only: take the next pass as the first."""
        for width in self._widths:
            width.reset()

    def width(self) -> tuple[int, int]:
        """Return how many rows the last pass had, and as many as take as long as a change."""
        width = self._widths[0]
        return width.rows, round(width.price)

    def _begin(self) -> None:
        """Make a request that has our memory for its caches. Raises OpenvinoVersionError where they
        are laid out otherwise.
        """
        self._request = self._compiled.create_infer_request()
        self._bound: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, openvino.Tensor] = {}
        self._longest = self._request.get_tensor("max_context_len").data
        inputs = {port.get_any_name(): port for port in self._compiled.inputs}
        for name, cache in self._caches.items():
            port = inputs[name]
            _check_layout(port, cache)
            # A tensor over an array does not keep it alive: ``pools`` do.
            tensor = openvino.Tensor(cache, list(cache.shape), port.get_element_type())
            self._request.set_tensor(port, tensor)

    def forward(self, chunks: Seq[PassChunk]) -> Floats:
        """Run the chunks in one pass, writing their KV; return the logits of the rows that want
        them [rows, vocab] (fp32), which the next call overwrites. Raises PassError.
        """
        self._branches.clear()
        self._ranked = self.hidden_states = None
        calls = in_calls(chunks, RUN_COPIES, invariant=self._invariant)
        free = iter(self._for_branches)
        if len(calls) == 1:
            self._ranked, self.hidden_states = self._call(calls[0], chunks, free)
            return self._ranked
        results: list[list[Floats]] = [[] for _ in chunks]
        states: list[list[Floats]] = [[] for _ in chunks]
        for call in calls:
            logits, hidden = self._call(call, chunks, free)
            wanted = [chunk.logits for _, chunk in call]
            tokens = [len(chunk.tokens) for _, chunk in call]
            for target, rows, counts in ((results, logits, wanted), (states, hidden, tokens)):
                if rows is not None:
                    parts = np.split(rows.copy(), np.cumsum(counts[:-1]))
                    for (number, _), part in zip(call, parts, strict=True):
                        target[number].append(part)
        if self.taps:
            self.hidden_states = np.concatenate([part for parts in states for part in parts])
        return np.concatenate([part for parts in results for part in parts])

    def _call(
        self, parts: Seq[tuple[int, PassChunk]], chunks: Seq[PassChunk], free: Iterator[int]
    ) -> tuple[Floats, Floats | None]:
        """Run parts of the chunks of these numbers, with branches in blocks that are ``free``;
        return the logits [rows, vocab] that they want, and all their rows' hidden states
        [tokens, taps, hidden].
        """
        layout = Layout(
            [part for _, part in parts], self._for_copies, free, invariant=self._invariant
        )
        if self._repeats:
            layout.fill(*self._widths, self._padding, self._threads)
        for (place, node), table in layout.branches.items():
            self._branches[id(chunks[parts[place][0]]), node] = table
        for source, target, tokens in layout.copies:
            self._copy(source, target, slice(tokens))
        inputs = layout.inputs(repeats=self._repeats)
        rows = len(inputs["rows"])
        if not rows:  # at least one row's logits, or OpenVINO would be asked for an empty product
            inputs["rows"] = [0]
        for name, values in inputs.items():
            self._bind(name, values)
        self._longest[...] = layout.longest
        out = self._output(max(rows, 1))
        self._request.infer(share_outputs=True)  # else it returns a copy of them
        # With one thread OpenVINO swallows an exception inside its graph: what is there then is
        # what was there before.
        if any(map(math.isnan, out[:, 0].tolist())):
            self._begin()  # the request is of no more use
            raise PassError(f"OpenVINO's pass of {len(parts)} sequences left no logits")
        for source, target, slots in layout.returns:  # not before: the block may be others', too
            self._copy(source, target, slots)
        hidden = None
        if self.taps:
            tokens = sum(len(part.tokens) for _, part in parts)
            states = self._request.get_tensor("hidden_states").data[:tokens]
            wide = widen(states) if self._is_half else states
            hidden = wide.reshape(tokens, len(self.taps), -1)
        return out[:rows], hidden

    def _bind(self, name: str, values: Seq[int] | Blocks) -> None:
        """Write an input into the memory that the request has for it."""
        bound = self._bound.get(name)
        if bound is None or len(bound) != len(values):
            tensor = self._tensors.get(name)
            if tensor is None:
                tensor = self._tensors[name] = self._request.get_tensor(name)
            tensor.shape = [len(values)]  # which may give it other memory
            bound = self._bound[name] = tensor.data
        bound[:] = values

    def _output(self, rows: int) -> Floats:
        """Return memory for logits [rows, vocab] that no pass has written."""
        if len(self._out) < rows:
            self._out = np.empty((1 << (rows - 1).bit_length(), self._vocab), np.float32)
            self._bound.pop("logits", None)
        out = self._out[:rows]
        out[:, 0] = math.nan
        bound = self._bound.get("logits")
        if bound is None or len(bound) != rows:
            self._bound["logits"] = out
            self._request.set_tensor("logits", openvino.Tensor(out, shared_memory=True))
        return out

    def best(
        self,
        logits: Floats,  # [rows, vocab]
        most: int,
    ) -> list[list[tuple[int, float]]] | None:
        """Return by row what ``sampling.distributions.likeliest`` does; None where these are not
        the logits that the last pass returned, or the graph does not rank.
        """
        if not self._ranks or logits is not self._ranked:
            return None
        ids, masses = (self._request.get_tensor(name).data for name in ("best_ids", "masses"))
        # In bf16 the graph compares rounded logits: of those that it finds alike the target takes
        # the greater, and of equals the first.
        values = np.take_along_axis(logits, ids, 1)
        order = np.argsort(-values, 1, kind="stable")
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
        shares = np.exp(values - values[:, :1])
        counts = (shares[:, :most] >= FAINT).sum(1)
        pairs = zip(ids.tolist(), (shares / masses).tolist(), counts.tolist(), strict=True)
        return [list(zip(row[:n], chances[:n], strict=True)) for row, chances, n in pairs]

    def keep(self, accepted: Seq[tuple[PassChunk, Seq[int]]]) -> None:
        """Copy the KV of accepted nodes on branches to where their tokens are in the text."""
        for chunk, path in accepted:
            branch = self._branches.get((id(chunk), path[-1]))
            if branch is None:
                continue
            end = chunk.start + len(chunk.tokens) - len(chunk.parents)
            for position in range(end, end + len(path)):
                index, offset = divmod(position, BLOCK_TOKENS)
                source, target = int(branch[index]), int(chunk.table.numbers[index])
                self._copy(source, target, offset)


def stored_as(precision: str) -> Type:
    """Return OpenVINO's type of activations in a ``precision``."""
    return getattr(Type, _STORED[precision])


def check_precision(precision: str) -> None:
    """Raise CheckpointError for a precision that the processor does not multiply in."""
    if precision == "bf16" and not machine.multiplies_bf16():
        raise CheckpointError(
            "dtype bf16 needs a processor that multiplies it (AVX512-BF16, AMX), this one has "
            f"{machine.instructions() or 'neither'}; 'auto' is fp32 here"
        )


def _reserve(shape: Seq[int], is_half: bool) -> npt.NDArray[Any]:
    """Return zeros that take memory only once they are written."""
    number = np.dtype(np.int16 if is_half else np.float32)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(shape) * number.itemsize, flags)
    return np.frombuffer(pages, number).reshape(shape)


def _check_layout(
    port: openvino.Output,
    cache: npt.NDArray[Any],  # [blocks, kv_heads, BLOCK_TOKENS, dim]
) -> None:
    """Raise OpenvinoVersionError unless a cache is laid out as OpenVINO will read it."""
    shape = port.get_partial_shape()
    wanted = [shape[axis].get_length() for axis in range(1, 4)]
    if wanted != list(cache.shape[1:]):
        text = f"blocks of [kv_heads, tokens, head_dim] {list(cache.shape[1:])}, wants {wanted}"
        raise OpenvinoVersionError(f"OpenVINO's caches must have {text}")
