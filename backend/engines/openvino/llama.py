"""A compiled Llama with its KV pool, which runs passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import torch
from openvino import Type

from backend.engines.checkpoint import CheckpointError, LlamaConfig, Weights
from backend.engines.openvino.graph import build
from backend.engines.openvino.kind import SCRATCH_TOKENS
from backend.engines.openvino.layout import Blocks, Layout, in_calls
from backend.engines.openvino.paged_attention import VersionError, check_version
from backend.engines.openvino.parts import Floats, compiled
from backend.engines.openvino.width import Width, price_of_change
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.machine import machine
from backend.sampling.laws import FAINT
from backend.sequence import BLOCK_TOKENS

SCRATCH_BLOCKS = SCRATCH_TOKENS // BLOCK_TOKENS
"""Blocks for a pass's copies, of a prompt's last block and for branches of trees, and one for rows
that are nobody's.
"""

RUN_COPIES = SCRATCH_BLOCKS // 2 - 1
"""The most prompts' copies of a call; half of the blocks are for branches."""

_STORED = {"fp32": (torch.float32, "f32"), "bf16": (torch.bfloat16, "bf16")}
"""By precision: how KV is held, and what OpenVINO calls it."""


HEAD_DIM_STEP = 16
"""Heads of 4 gave wrong texts where vectors have 8 numbers; they may have 16."""


class PassError(RuntimeError):
    """A pass that left no logits."""


def most_branches(longest: int) -> int:
    """Return how many branches of trees a call has room for, of paths of so many nodes."""
    blocks_each = 1 + -(-longest // BLOCK_TOKENS)
    return SCRATCH_BLOCKS // 2 // blocks_each


class OpenvinoLlama:
    """A decoder with a KV pool of ``kv_blocks`` blocks; positions up to ``max_positions``.

    ``precision`` is that of activations and KV (``fp32``, ``bf16``); ``int8``: matrices in int8.
    ``invariant``: logits are the same bits whatever else is in a pass (``layout``). ``trees``: it
    verifies trees. ``best``: a draft's graph ranks so many columns. ``taps``: the layers, counted
    from 1, behind which ``features`` are kept. ``weights`` is emptied.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kv_blocks: int,
        max_positions: int,
        precision: str = "fp32",
        int8: bool = False,
        threads: int = 1,
        invariant: bool = True,
        trees: bool = True,
        best: int = 0,
        taps: Seq[int] = (),
    ) -> None:
        """Compile the graph. Raises VersionError for another OpenVINO than is known, and
        CheckpointError for heads whose size its attention gets wrong.
        """
        check_version()
        if config.head_dim % HEAD_DIM_STEP:
            raise CheckpointError(
                f"config.json: head_dim must be a multiple of {HEAD_DIM_STEP} for the engine "
                f"'openvino', got {config.head_dim}; set engine to 'torch'"
            )
        self.config, self._taps = config, taps
        self.features: torch.Tensor | None = None
        self.token_ids = weights.get("lm_head.token_ids")
        self._invariant, self._threads, self._ranks = invariant, threads, best > 0
        self._repeats = trees or invariant
        self._ranked: torch.Tensor | None = None  # the logits whose best are known
        self._for_copies = range(kv_blocks, kv_blocks + RUN_COPIES)
        self._nobodys = np.array([kv_blocks + RUN_COPIES], np.int32)
        self._for_branches = range(kv_blocks + RUN_COPIES + 1, kv_blocks + SCRATCH_BLOCKS)
        self._branches: dict[tuple[int, int], Blocks] = {}
        if precision == "bf16" and not machine.multiplies_bf16():
            raise CheckpointError(
                "dtype bf16 needs a processor that multiplies it (AVX512-BF16, AMX), this one has "
                f"{machine.instructions() or 'neither'}; 'auto' is fp32 here"
            )
        dtype, held = _STORED[precision]
        graph = build(
            config,
            weights,
            max_positions=max_positions,
            int8=int8,
            repeats=self._repeats,
            best=best,
            taps=taps,
            held=getattr(Type, held),
        )
        weights.clear()
        self._compiled = compiled(graph, held, threads)
        self._vocab = config.draft_vocab_size or config.vocab_size
        self._out = np.empty((0, self._vocab), np.float32)
        blocks = kv_blocks + SCRATCH_BLOCKS
        shape = (config.num_layers, 2, blocks, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype)
        """KV [layers, keys and values, blocks, kv_heads, BLOCK_TOKENS, head_dim]."""
        plain = self.pool.view(torch.int16) if dtype == torch.bfloat16 else self.pool
        self._kv = plain.numpy()  # the same memory, of which NumPy copies a few tokens faster
        self._begin()
        self._widths = Width(0), Width(0)
        price = price_of_change(self._probe) if self._repeats else 0
        self._widths = Width(price), Width(price)  # of the pass, and of its attention

    def _probe(self, rows: int) -> None:
        """Run a pass of rows that are nobody's."""
        chunk = Chunk([0], 0, KVTable(self._nobodys.tolist(), "cpu"), 0)
        self._call([(0, chunk)] * rows, (), iter(()))

    def seen_none(self) -> None:
        """For measuring only: take the next pass as the first."""
        for width in self._widths:
            width.reset()

    def width(self) -> tuple[int, int]:
        """Return how many rows the last pass had, and as many as take as long as a change."""
        made = self._widths[0]
        return made.rows, round(made.price)

    def _begin(self) -> None:
        """Make a request that has our memory for its caches. Raises VersionError where they are
        laid out otherwise.
        """
        self._request = self._compiled.create_infer_request()
        self._bound: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, openvino.Tensor] = {}
        self._longest = self._request.get_tensor("max_context_len").data
        inputs = {port.get_any_name(): port for port in self._compiled.inputs}
        for layer, caches in enumerate(self._kv):
            for kind, cache in zip(("key", "value"), caches, strict=True):
                port = inputs[f"{kind}_cache.{layer}"]
                _check_layout(port, cache)
                # A tensor over an array does not keep it alive: ``pool`` does.
                tensor = openvino.Tensor(cache, list(cache.shape), port.get_element_type())
                self._request.set_tensor(port, tensor)

    def forward(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run the chunks in one pass, writing their KV; return the logits of the rows that want
        them [rows, vocab] (fp32), which the next call overwrites. Raises PassError.
        """
        self._branches.clear()
        self._ranked = self.features = None
        calls = in_calls(chunks, RUN_COPIES, invariant=self._invariant)
        free = iter(self._for_branches)
        if len(calls) == 1:
            self._ranked, self.features = self._call(calls[0], chunks, free)
            return self._ranked
        found: list[list[torch.Tensor]] = [[] for _ in chunks]
        states: list[list[torch.Tensor]] = [[] for _ in chunks]
        for call in calls:
            logits, features = self._call(call, chunks, free)
            counts = [chunk.logits for _, chunk in call]
            for kept, rows in ((found, logits), (states, features)):
                if rows is not None:
                    parts = torch.split(rows.clone(), counts)
                    for (number, _), part in zip(call, parts, strict=True):
                        kept[number].append(part)
        if self._taps:
            self.features = torch.cat([part for parts in states for part in parts])
        return torch.cat([part for parts in found for part in parts])

    def _call(
        self, parts: Seq[tuple[int, Chunk]], chunks: Seq[Chunk], free: Iterator[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run parts of the chunks of these numbers, with branches in blocks that are ``free``;
        return the logits that they want, and the features of these rows.
        """
        layout = Layout(
            [part for _, part in parts], self._for_copies, free, invariant=self._invariant
        )
        if self._repeats:
            layout.fill(*self._widths, self._nobodys, self._threads)
        for (place, node), table in layout.branches.items():
            self._branches[id(chunks[parts[place][0]]), node] = table
        for source, target, tokens in layout.copies:
            self._kv[:, :, target, :, :tokens] = self._kv[:, :, source, :, :tokens]
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
        for source, target, written in layout.returns:  # not before: the block may be others', too
            self._kv[:, :, target, :, written] = self._kv[:, :, source, :, written]
        features = None
        if self._taps:
            states = torch.from_numpy(self._request.get_tensor("features").data[:rows])
            shape = (rows, len(self._taps), self.config.hidden_size)
            features = states.view(self.pool.dtype).view(shape)  # NumPy has no bf16
        return torch.from_numpy(out[:rows]), features

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

    def best(self, logits: torch.Tensor, most: int) -> list[list[tuple[int, float]]] | None:
        """Return what ``backend.sampling.laws.likeliest`` does; None where these are not the logits
        that the last pass returned, or the graph does not rank.
        """
        if not self._ranks or logits is not self._ranked:
            return None
        ids, values, masses = (
            self._request.get_tensor(name).data for name in ("best_ids", "best_logits", "masses")
        )
        shares = np.exp(values - values[:, :1])
        kept = (shares[:, :most] >= FAINT).sum(1)
        pairs = zip(ids.tolist(), (shares / masses).tolist(), kept.tolist(), strict=True)
        return [list(zip(row[:n], chances[:n], strict=True)) for row, chances, n in pairs]

    def keep(self, accepted: Seq[tuple[Chunk, Seq[int]]]) -> None:
        """Copy the KV of accepted nodes on branches to where their tokens are in the text."""
        for chunk, path in accepted:
            branch = self._branches.get((id(chunk), path[-1]))
            if branch is None:
                continue
            end = chunk.start + len(chunk.tokens) - len(chunk.parents)
            for position in range(end, end + len(path)):
                index, offset = divmod(position, BLOCK_TOKENS)
                source, target = int(branch[index]), int(chunk.table.numbers[index])
                self._kv[:, :, target, :, offset] = self._kv[:, :, source, :, offset]


def _check_layout(port: openvino.Output, cache: npt.NDArray[Any]) -> None:
    """Raise VersionError unless a cache is laid out as OpenVINO will read it."""
    shape = port.get_partial_shape()
    wanted = [shape[axis].get_length() for axis in range(1, 4)]
    if wanted != list(cache.shape[1:]):
        text = f"blocks of [kv_heads, tokens, head_dim] {list(cache.shape[1:])}, wants {wanted}"
        raise VersionError(f"OpenVINO's caches must have {text}")
