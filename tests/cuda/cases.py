"""Random paged batches for the attention kernel, and the same attention in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend.engines.cuda.pages import ancestor_words


class PagedCase(NamedTuple):
    """A batch as the kernel reads it; pages that a row does not own hold NaN."""

    q: torch.Tensor
    kv: torch.Tensor
    table: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    most: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The kernel's positional arguments."""
        return self[:6]

    def row(self, row: int) -> PagedCase:
        """Return the batch of one row alone."""
        begin, end = int(self.first[row]), int(self.first[row + 1])
        first = torch.tensor([0, end - begin], dtype=torch.int32, device=self.q.device)
        return PagedCase(
            self.q[begin:end].contiguous(),
            self.kv,
            self.table[row : row + 1].contiguous(),
            self.start[row : row + 1].contiguous(),
            first,
            self.ancestors[begin:end].contiguous(),
            self.most,
        )


def paged_case(
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    contexts: list[int],
    trees: list[list[int]],
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> PagedCase:
    """Return a batch of rows with ``contexts`` committed keys and ``trees`` of proposed nodes."""
    generator = torch.Generator().manual_seed(seed)
    counts = [len(tree) + 1 for tree in trees]
    need = [-(-(context + count) // page) for context, count in zip(contexts, counts, strict=True)]
    blocks = sum(need) + 3
    order = torch.randperm(blocks, generator=generator).int()
    kv = torch.full((blocks, 2, kv_heads, page, dim), float("nan"))
    table = torch.zeros(len(contexts), max(need) + 1, dtype=torch.int32)
    at = 0
    for row, n in enumerate(need):
        owned = order[at : at + n]
        table[row, :n] = owned
        kv[owned.long()] = torch.randn(n, 2, kv_heads, page, dim, generator=generator)
        at += n
    words = [word for tree in trees for word in ancestor_words(tree)]
    first = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn(int(first[-1]), heads, dim, generator=generator)
    return PagedCase(
        q.to(device, dtype),
        kv.to(device, dtype),
        table.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        first.to(device),
        torch.tensor(words, dtype=torch.int64, device=device),
        max(counts),
    )


def attention_reference(
    case: PagedCase, scale: float, *, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Return the attention of a batch in fp64 [tokens, heads, dim], row by row, on the CPU."""
    q, kv, table, start, first, ancestors = (x.cpu() for x in case.tensors)
    _, _, kv_heads, _, dim = kv.shape
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for row, context in enumerate(start.tolist()):
        begin, end = int(first[row]), int(first[row + 1])
        new, keys = end - begin, context + end - begin
        pages = kv[table[row].long()].double()
        k, v = (
            pages[:, which].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :keys] for which in (0, 1)
        )
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[begin:end].double(), k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        words = ancestors[begin:end]
        own = (words[:, None] >> torch.arange(new)) & 1
        seen = torch.cat((torch.ones(new, context), own), 1).bool()
        if window:
            position = torch.tensor([context + int(bits.sum()) - 1 for bits in own])
            seen[:, :context] &= position[:, None] - torch.arange(context)[None] < window
        scores = scores.masked_fill(~seen, -torch.inf)
        out[begin:end] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), v)
    return out
