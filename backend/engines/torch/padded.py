"""Attention of many short chunks side by side: contexts padded to the longest, or cut into pieces
that are padded to the longest piece.

What an engine that pads to one width reads beyond the contexts, request decomposition (SPIN, arXiv
2503.15921) takes back: a context is cut into pieces, each attended to by itself, and their outputs
are merged exactly, weighted by the softmax of their logarithms of summed exponentials
(``policy.decomposition`` decides where and how).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from backend.engines.stepping.chunks import Chunk, ancestors
from backend.sequence import BLOCK_TOKENS

FAR = -1e30
"""The mask's word for a key that is not seen. Finite, so that a piece of which a row sees nothing
has an output, whose weight is zero.
"""


class Padded:
    """Attention over one pass's ``chunks``, which are rows ``first_rows[i]`` and following of the
    pass; made once, called by every layer.

    A chunk whose ``piece_tokens`` is above 0 has its context cut into pieces of so many tokens
    (whole blocks); the last of them takes the chunk's own keys too.
    """

    def __init__(
        self,
        chunks: Seq[Chunk],
        first_rows: Seq[int],
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        pieces = [
            (number, *bounds) for number, chunk in enumerate(chunks) for bounds in _pieces(chunk)
        ]
        owner, begin, end = torch.tensor(pieces, device=device).T
        counts = [len(chunk.tokens) for chunk in chunks]
        rows, starts, firsts = (
            torch.tensor(column, device=device)[:, None]
            for column in (counts, [c.start for c in chunks], first_rows)
        )
        row = torch.arange(max(counts), device=device).minimum(
            rows - 1
        )  # the last again where a chunk has fewer
        self._query_rows, self._queries = (firsts + row).flatten(), max(counts)
        self._output_rows = (
            (torch.arange(max(counts), device=device) < rows).flatten().nonzero()[:, 0]
        )
        self.rows = self._query_rows[self._output_rows]
        width = max(-(-(stop - start) // BLOCK_TOKENS) for _, start, stop in pieces)
        position = begin[:, None] + torch.arange(width * BLOCK_TOKENS, device=device)
        outside = position >= end[:, None]
        hidden = outside[:, None] | (position[:, None] > (starts + row)[owner][:, :, None])
        _hide_others_of_trees(hidden, chunks, pieces)
        self._mask = (
            torch.zeros(hidden.shape, dtype=dtype, device=device)
            .masked_fill_(hidden, FAR)
            .repeat(1, group, 1)[:, None]
        )
        self._blocks = _blocks(chunks, owner, begin, width).flatten()
        self._unused = outside.flatten().nonzero()[:, 0]
        self._merge_by(owner, len(chunks))

    def _merge_by(self, owner: torch.Tensor, sequences: int) -> None:
        """Note whose the pieces are: ``_places`` lays them out [sequences, most], so that a softmax
        over these weighs them.
        """
        counts = owner.bincount(minlength=sequences)
        self._owner, self._sequences, self._most = owner, sequences, int(counts.max())
        within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        self._places = owner * self._most + within

    def __call__(self, qkv: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """Return the output [rows of the chunks, heads x head_dim] from ``qkv`` [rows of the pass,
        heads + 2 kv_heads, head_dim].
        """
        kv_heads, head_dim = pool.shape[1] // 2, pool.shape[2]
        queries = qkv[:, : kv_heads * self._group].index_select(0, self._query_rows)
        shape = self._sequences, self._queries, kv_heads, self._group, head_dim
        queries = (
            queries.view(shape)
            .permute(0, 2, 3, 1, 4)
            .reshape(self._sequences, kv_heads, -1, head_dim)
        )
        keys, values = self._kv(pool)
        if self._most == 1:
            output = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=self._mask
            )
        else:
            queries = queries.index_select(0, self._owner)
            output = self._merged(*partial(queries, keys, values, self._mask))
        output = output.view(-1, kv_heads, self._group, self._queries, head_dim).permute(
            0, 3, 1, 2, 4
        )
        return output.reshape(-1, kv_heads * self._group * head_dim).index_select(
            0, self._output_rows
        )

    def _kv(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [pieces, kv_heads, keys, head_dim], zeros where a piece has
        none.
        """
        kv_heads, head_dim = pool.shape[1] // 2, pool.shape[2]
        blocks = pool.view(-1, BLOCK_TOKENS * 2 * kv_heads * head_dim)
        kv = blocks.index_select(0, self._blocks).view(-1, 2 * kv_heads, head_dim)
        # Whatever is there, a weight of zero does not undo it if it is no number.
        kv.index_fill_(0, self._unused, 0.0)
        kv = kv.view(-1, self._mask.shape[3], 2 * kv_heads, head_dim).transpose(1, 2)
        return kv[:, :kv_heads], kv[:, kv_heads:]

    def _merged(self, outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return sum_j softmax_j(sums)_j outputs_j over each sequence's pieces j: exactly the
        attention over all of them.
        """
        laid_out = sums.new_full(
            (self._sequences * self._most, *sums.shape[1:]), -math.inf
        ).index_copy_(0, self._places, sums)
        weights = (
            laid_out.view(self._sequences, self._most, *sums.shape[1:])
            .softmax(1)
            .flatten(0, 1)
            .index_select(0, self._places)
        )
        merged = weights.new_zeros(self._sequences, *outputs.shape[1:]).index_add_(
            0, self._owner, outputs * weights[..., None]
        )
        return merged.to(outputs.dtype)


def partial(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's output [pieces, heads, rows, head_dim] and log sum exp of its scores
    [pieces, heads, rows].
    """
    if queries.device.type == "cpu":
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, attn_mask=mask
        )
        return output, sums
    return partial_by_products(queries, keys, values, mask)


def partial_by_products(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same on any device, at the cost of writing the scores."""
    scores = (queries @ keys.transpose(2, 3)).to(
        torch.promote_types(queries.dtype, torch.float32)
    ) / math.sqrt(queries.shape[3]) + mask
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp().to(values.dtype) @ values, sums


def _pieces(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the first position of every piece of a chunk's keys, and the position behind its
    last.
    """
    length, keys = chunk.piece_tokens, chunk.start + len(chunk.tokens)
    begins = [*range(0, chunk.start, length)] if length and chunk.start else [0]
    return list(zip(begins, [*begins[1:], keys], strict=True))


def _hide_others_of_trees(
    hidden: torch.Tensor, chunks: Seq[Chunk], pieces: Seq[tuple[int, int, int]]
) -> None:
    """Hide from a tree's nodes all others but their ancestors; they are in the chunk's last piece,
    behind its other keys.
    """
    last = {number: (piece, end - begin) for piece, (number, begin, end) in enumerate(pieces)}
    for number, chunk in enumerate(chunks):
        if chunk.parents:
            (piece, end), nodes, rows = last[number], len(chunk.parents), len(chunk.tokens)
            hidden[piece, rows - nodes : rows, end - nodes : end] |= ~ancestors(chunk.parents).to(
                hidden.device
            )


def _blocks(
    chunks: Seq[Chunk], owner: torch.Tensor, begin: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the ``width`` blocks that every piece reads [pieces, width]; behind a sequence's end
    its last one again.
    """
    held = [-(-(chunk.start + len(chunk.tokens)) // BLOCK_TOKENS) for chunk in chunks]
    tables = pad_sequence(
        [chunk.table.blocks[:blocks] for chunk, blocks in zip(chunks, held, strict=True)],
        batch_first=True,
    )
    place = begin[:, None] // BLOCK_TOKENS + torch.arange(width, device=owner.device)
    last = torch.tensor(held, device=owner.device)[owner][:, None] - 1
    return tables[owner[:, None], place.minimum(last)]
