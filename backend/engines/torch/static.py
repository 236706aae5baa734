"""Decoding and verifying passes in static shapes: a few sizes of batch, rows and context, so that
CUDA replays each as one graph.

A pass is padded to the next size up. All that the host says of it is one tensor, which reaches the
device in one copy that nobody waits for. Everything behind is made of that tensor by operations
whose shapes follow from the size alone, so that one recording serves every pass of a size. What is
padded writes its KV into a block that no sequence has.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from backend.engines.torch.chunks import Chunk, ancestors
from backend.engines.torch.padded import FAR
from backend.sequence import BLOCK_TOKENS

MOST_QUERIES = 17
"""Rows of a sequence in a static pass at the most; a pass with longer chunks (prefill) runs as it
is.
"""

LEAST_BLOCKS = 8
"""The shortest context, in blocks, that there is a size for."""

_RECORDING = Lock()
"""Held while a graph is recorded: CUDA allows no more than one at a time, and target and drafts may
run in two threads.
"""

Work = Callable[[], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Layers = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attend], torch.Tensor]
"""The decoder's layers: token ids, positions and slots (each [rows]) and an attention to hidden
states [rows, hidden].
"""


class Size(NamedTuple):
    """What a static pass has room for: ``sequences`` of ``queries`` rows each, whose contexts lie
    in ``blocks`` blocks each.
    """

    sequences: int
    queries: int
    blocks: int

    @classmethod
    def of(cls, chunks: Seq[Chunk]) -> Size:
        """Return the least size with room for the chunks: powers of two, and for their rows also
        one more than these.
        """
        queries = max(len(chunk.tokens) for chunk in chunks)
        blocks = max(_blocks(chunk) for chunk in chunks)
        return cls(
            _power_of_two(len(chunks)),
            1 + _power_of_two(queries - 1),
            max(LEAST_BLOCKS, _power_of_two(blocks)),
        )


class StaticPasses:
    """Runs passes of short chunks through a decoder's ``layers``; ``record`` makes of work on the
    device what repeats it.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        scratch_block: int,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        record: Callable[[Work], Work],
    ) -> None:
        self._layers, self._group, self._dtype = layers, group, dtype
        self._scratch_block, self._device, self._record = scratch_block, device, record
        self._passes: dict[Size, tuple[Inputs, Work]] = {}

    @staticmethod
    def takes(chunks: Seq[Chunk]) -> bool:
        """Whether all chunks are short enough."""
        return all(len(chunk.tokens) <= MOST_QUERIES for chunk in chunks)

    def __call__(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run the chunks, writing their KV; return the hidden states [rows, hidden] of the rows
        that want logits, chunk by chunk.
        """
        size = Size.of(chunks)
        if size not in self._passes:
            inputs = Inputs(size, self._scratch_block, self._device)
            inputs.send(chunks)
            self._passes[size] = inputs, self._record(lambda: self._work(inputs))
        inputs, work = self._passes[size]
        wanted = inputs.send(chunks)
        return work().index_select(0, inputs["wanted"][:wanted])

    def _work(self, inputs: Inputs) -> torch.Tensor:
        return self._layers(
            inputs["ids"],
            inputs["positions"],
            inputs["slots"],
            _Attention(inputs, self._group, self._dtype),
        )


class Inputs:
    """What the device is told of a pass, all int64 and in one tensor.

    Of every row its token ``ids``, ``positions`` and ``slots`` [sequences x queries], and the
    numbers of those that want logits (``wanted``); of every sequence its ``context`` [sequences]
    (tokens before the pass), the ``end`` of its keys, its ``blocks`` [sequences, blocks], and which
    of the pass's tokens each row sees (``seen`` [sequences, queries, queries]).
    """

    def __init__(self, size: Size, scratch_block: int, device: torch.device) -> None:
        self.size, self._scratch_block, self._device = size, scratch_block, device
        rows = size.sequences * size.queries
        self._shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("ids", "positions", "slots", "wanted"), (rows,)
        )
        self._shapes |= dict.fromkeys(("context", "end"), (size.sequences,))
        self._shapes |= {
            "blocks": (size.sequences, size.blocks),
            "seen": (size.sequences, size.queries, size.queries),
        }
        pinned = device.type == "cuda"
        self._host = torch.zeros(
            sum(map(prod, self._shapes.values())), dtype=torch.int64, pin_memory=pinned
        )
        self._there = self._host.to(device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._views = self._cut(self._there)
        self._written = {name: view.numpy() for name, view in self._cut(self._host).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def send(self, chunks: Seq[Chunk]) -> int:
        """Say what the chunks are, without waiting for the device to hear it; return how many rows
        want logits.
        """
        if self._sent:
            self._sent.synchronize()  # the copy before this one has left the host's memory
        wanted = self._write(chunks)
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
        if self._sent:
            self._sent.record(torch.cuda.current_stream(self._device))
        return wanted

    def _write(self, chunks: Seq[Chunk]) -> int:
        to, queries, wanted = self._written, self.size.queries, list[int]()
        for name, unused in {
            "ids": 0,
            "positions": 0,
            "slots": self._scratch_block * BLOCK_TOKENS,
            "blocks": self._scratch_block,
        }.items():
            to[name].fill(unused)
        to["context"].fill(0)
        to["end"].fill(1)
        to["seen"][:] = np.tri(queries, dtype=np.int64)
        for number, chunk in enumerate(chunks):
            rows, nodes, held = len(chunk.tokens), len(chunk.parents), _blocks(chunk)
            first, blocks = number * queries, chunk.table.numbers[:held]
            place = np.arange(chunk.start, chunk.start + rows)
            to["ids"][first : first + rows] = chunk.tokens
            to["positions"][first : first + rows] = chunk.positions
            to["slots"][first : first + rows] = (
                blocks[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS
            )
            to["blocks"][number, :held] = blocks
            to["context"][number], to["end"][number] = chunk.start, chunk.start + rows
            if nodes:
                to["seen"][number, rows - nodes : rows, rows - nodes : rows] = ancestors(
                    chunk.parents
                ).numpy()
            wanted += range(first + rows - chunk.logits, first + rows)
        to["wanted"][: len(wanted)] = wanted
        return len(wanted)

    def _cut(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = whole.split([prod(shape) for shape in self._shapes.values()])  # type: ignore[no-untyped-call]
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }


class _Attention:
    """Attention of every sequence's rows over its blocks; made once a pass, called by every
    layer.
    """

    def __init__(self, inputs: Inputs, group: int, dtype: torch.dtype) -> None:
        self._size, self._group, self._blocks = inputs.size, group, inputs["blocks"].flatten()
        queries, device = inputs.size.queries, inputs["context"].device
        position = torch.arange(inputs.size.blocks * BLOCK_TOKENS, device=device)
        token = (position - inputs["context"][:, None])[:, None].expand(
            -1, queries, -1
        )  # its number among the pass's
        seen = inputs["seen"].gather(2, token.clamp(0, queries - 1)).bool() & (token < queries) | (
            token < 0
        )
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, FAR)
        self._mask = mask.repeat(1, group, 1)[:, None]
        self._unused = (position >= inputs["end"][:, None])[..., None, None]

    def __call__(self, qkv: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """Return the output [rows, heads x head_dim] from ``qkv`` [rows, heads + 2 kv_heads,
        head_dim].
        """
        sequences, queries, blocks = self._size
        kv_heads, head_dim, group = pool.shape[1] // 2, pool.shape[2], self._group
        kv = pool.view(-1, BLOCK_TOKENS * 2 * kv_heads * head_dim).index_select(0, self._blocks)
        kv = kv.view(sequences, blocks * BLOCK_TOKENS, 2 * kv_heads, head_dim)
        kv = kv.masked_fill_(self._unused, 0.0).transpose(
            1, 2
        )  # a weight of zero does not undo what is no number
        rows = (
            qkv[:, : kv_heads * group]
            .view(sequences, queries, kv_heads, group, head_dim)
            .permute(0, 2, 3, 1, 4)
        )
        rows = rows.reshape(sequences, kv_heads, group * queries, head_dim)
        output = functional.scaled_dot_product_attention(
            rows, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=self._mask
        )
        output = output.reshape(sequences, kv_heads, group, queries, head_dim).permute(
            0, 3, 1, 2, 4
        )
        return output.reshape(sequences * queries, kv_heads * group * head_dim)


def recorder(device: torch.device) -> Callable[[Work], Work]:
    """Return what makes a CUDA graph of work on the device; elsewhere the work is done anew every
    time.

    The graphs share their memory: what one returns holds until the next is replayed, on whatever
    stream is current then.

    They are captured on a stream of their own: cuBLAS has a workspace for each stream, whose
    address a graph keeps, and graphs of two engines may run side by side. Torch hands out 32
    streams of a priority in turn, again and again; another priority than that of ``SideStream``
    makes sure that none is captured on a stream that a thread is using.
    """
    if device.type != "cuda":
        return lambda work: work
    pool: Any = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with _RECORDING:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                work()  # libraries make their workspaces in the first call, which a graph cannot
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record


def _blocks(chunk: Chunk) -> int:
    """Return how many blocks hold a chunk's keys."""
    return -(-(chunk.start + len(chunk.tokens)) // BLOCK_TOKENS)


def _power_of_two(least: int) -> int:
    """Return the least power of two that is no less, 0 for 0."""
    return 1 << (least - 1).bit_length() if least else 0
