"""A Llama-shaped decoder step with random weights over static buffers, to be captured in a graph.

It has the kernels of ``backend/engines/cuda`` and nothing else: what the engine can reach at best
with transformers' modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend.engines.cuda.ancestors import ancestor_words
from backend.engines.cuda.kernels import Kernels
from backend.engines.cuda.pages import PAGE


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-shaped decoder."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Columns of the packed query, key and value product."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of a token, all layers, in 16 bits."""
        return self.layers * 2 * self.kv_heads * self.dim * 2


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    # one layer on the target's states, and the 32,000 likeliest tokens, as EAGLE-3 has them
    "head": Shape(1, 4096, 14336, 32, 8, 128, 32000),
    "tiny": Shape(2, 64, 128, 4, 2, 32, 512),
}


class Weights:
    """Random weights of a shape."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype) * float(columns**-0.5)

        def ones() -> torch.Tensor:
            return torch.ones(shape.hidden, device=device, dtype=dtype)

        self.embedding = matrix(shape.vocab, shape.hidden)
        self.head = matrix(shape.vocab, shape.hidden)
        self.norm = ones()
        self.layers = [
            {
                "qkv": matrix(shape.qkv, shape.hidden),
                "o": matrix(shape.hidden, shape.heads * shape.dim),
                "gate_up": matrix(2 * shape.inner, shape.hidden),
                "down": matrix(shape.hidden, shape.inner),
                "norm1": ones(),
                "norm2": ones(),
            }
            for _ in range(shape.layers)
        ]
        half = shape.dim // 2
        frequency = 500000.0 ** -(torch.arange(half, device=device).float() / half)
        self.frequency = torch.cat((frequency, frequency))

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return sum(x.nbytes for layer in self.layers for x in layer.values()) + self.head.nbytes


def new_kv(shape: Shape, blocks: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return random KV of every layer [blocks, 2, kv_heads, page, dim]."""
    size = (blocks, 2, shape.kv_heads, PAGE, shape.dim)
    return [torch.randn(size, device=device, dtype=dtype) * 0.1 for _ in range(shape.layers)]


class Step:
    """One bucket: ``rows`` sequences of ``most`` new tokens each, a chain."""

    def __init__(
        self,
        weights: Weights,
        kv: list[torch.Tensor],
        rows: int,
        most: int,
        max_keys: int,
        kernels: Kernels,
    ) -> None:
        shape, device = weights.shape, weights.device
        self.weights, self.kv, self.rows, self.most = weights, kv, rows, most
        self._kernels, self._keys = kernels, max_keys
        tokens = self.tokens = rows * most

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(*size, device=device, dtype=weights.dtype)

        def integers(*size: int) -> torch.Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.position, self.place = (integers(tokens) for _ in range(2))
        self.table, self.start = integers(rows, -(-max_keys // PAGE // 16) * 16), integers(rows)
        self.first = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
        words = ancestor_words(list(range(-1, most - 2))) * rows
        self.ancestors = torch.tensor(words, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(tokens, device=device)
        self.bound = torch.full((tokens,), float("-inf"), device=device)
        self.words = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.x, self.residual = (empty(tokens, shape.hidden) for _ in range(2))
        self.q = empty(tokens, shape.heads, shape.dim)
        self.inner = empty(tokens, shape.inner)
        self.logits = empty(0)

    def fill(self, context: int, seed: int = 0) -> None:
        """Give every row ``context`` committed tokens in blocks of its own, shuffled."""
        generator = torch.Generator().manual_seed(seed)
        need = -(-(context + self.most) // PAGE)
        blocks = torch.randperm(self.rows * need, generator=generator).view(self.rows, need).int()
        position = torch.arange(context, context + self.most)
        ids = torch.randint(0, self.weights.shape.vocab, (self.tokens,), generator=generator)
        self.ids.copy_(ids)
        self.table[:, :need].copy_(blocks)
        self.start.fill_(context)
        self.position.copy_(position.repeat(self.rows).int())
        place = blocks[:, (position // PAGE).tolist()] * PAGE + (position % PAGE).int()[None]
        self.place.copy_(place.flatten().int())

    def run(self) -> torch.Tensor:
        """Launch the step; return the tokens drawn at every place, int32[tokens]."""
        weights, shape, kernels = self.weights, self.weights.shape, self._kernels
        angle = self.position.float()[:, None] * weights.frequency
        cos, sin = angle.cos(), angle.sin()
        torch.index_select(weights.embedding, 0, self.ids, out=self.residual)
        y = None
        for layer, kv in zip(weights.layers, self.kv, strict=True):
            kernels.add_rms_norm(y, self.residual, layer["norm1"], 1e-5, self.x)
            qkv = kernels.linear(self.x, layer["qkv"], None)
            kernels.rotate_and_store(qkv, self.q, kv, cos, sin, self.place)
            attended = kernels.attention(
                self.q,
                kv,
                self.table,
                self.start,
                self.first,
                self.ancestors,
                most=self.most,
                keys=self._keys,
                scale=shape.dim**-0.5,
            )
            y = kernels.linear(attended.view(self.tokens, -1), layer["o"], None)
            kernels.add_rms_norm(y, self.residual, layer["norm2"], 1e-5, self.x)
            kernels.gated(kernels.linear(self.x, layer["gate_up"], None), self.inner)
            y = kernels.linear(self.inner, layer["down"], None)
        kernels.add_rms_norm(y, self.residual, weights.norm, 1e-5, self.x)
        self.logits = kernels.linear(self.x, weights.head, None)
        return kernels.draw(self.logits, self.temperature, self.bound, self.words)
