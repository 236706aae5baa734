"""Attention of decoding and verification over paged KV, for a batch of chains and trees.

Row r of the batch owns the query tokens ``first[r]`` to ``first[r + 1]``. A query attends to all
committed keys of its row (positions below ``start[r]``) and, among the row's new tokens, to those
whose bit is set in its 64-bit ancestor word: itself and its ancestors.

Contexts are cut into splits of a fixed number of tokens, so a row's partial results, and the order
they are merged in, do not depend on the rest of the batch. All lengths are read from device memory,
and the grid has room for the longest context that the table can name: one launch serves every step
of as many rows and tokens, and may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend.engines.cuda.pages import split_tokens

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_split(
    q_ptr,
    kv_ptr,
    table_ptr,
    start_ptr,
    first_ptr,
    ancestors_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    table_stride,
    partial_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(2)
    head, query_block = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    first = tl.load(first_ptr + row)
    count = tl.load(first_ptr + row + 1) - first
    start = tl.load(start_ptr + row)
    keys = start + count
    begin = split * SPLIT
    if (count <= query_block * BLOCK_Q) | (begin >= keys):
        return
    end = tl.minimum(begin + SPLIT, keys)

    lane = tl.arange(0, BLOCK_M)  # query token `token` of the row, head `member` of the group
    token, member = query_block * BLOCK_Q + lane // GROUP, lane % GROUP
    is_query = (token < count) & (lane < BLOCK_Q * GROUP)
    columns = tl.arange(0, DIM)
    query_row = ((first + token).to(tl.int64) * KV_HEADS + head) * GROUP + member
    queries = tl.load(
        q_ptr + query_row[:, None] * DIM + columns[None, :], mask=is_query[:, None], other=0.0
    )
    word = tl.load(ancestors_ptr + first + token, mask=is_query, other=0)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, DIM), tl.float32)
    for at in range(begin, end, TILE):
        key = at + tl.arange(0, TILE)
        exists = key < end
        page = tl.load(table_ptr + row * table_stride + key // PAGE, mask=exists, other=0)
        tile = (page.to(tl.int64) * 2 * KV_HEADS + head) * PAGE * DIM + (key % PAGE) * DIM
        k = tl.load(kv_ptr + tile[None, :] + columns[:, None], mask=exists[None, :], other=0.0)
        v = tl.load(
            kv_ptr + (tile + KV_HEADS * PAGE * DIM)[:, None] + columns[None, :],
            mask=exists[:, None],
            other=0.0,
        )
        score = tl.dot(queries, k)
        if SOFTCAP > 0.0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            squashed = 1.0 - 2.0 / (tl.exp2(score * (scale * 2.0 / SOFTCAP * _LOG2_E)) + 1.0)
            score = squashed * (SOFTCAP * _LOG2_E)
        else:
            score = score * (scale * _LOG2_E)
        new = key - start  # >= 0 for the row's new tokens
        is_ancestor = (word[:, None] >> tl.maximum(new, 0)[None, :].to(tl.int64)) & 1
        is_visible = exists[None, :] & ((new < 0)[None, :] | (is_ancestor != 0))
        if WINDOW > 0:
            depth = tl.zeros((BLOCK_M,), tl.int32)
            for bit in tl.static_range(64):
                depth += ((word >> bit) & 1).to(tl.int32)
            oldest = start + depth - WINDOW  # position + 1 - WINDOW
            is_visible = is_visible & (key[None, :] >= oldest[:, None])
        score = tl.where(is_visible, score, float("-inf"))
        greatest = tl.maximum(best, tl.max(score, 1))
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        best = greatest
    lse = tl.where(total > 0, best + tl.log2(total), float("-inf"))
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at_partial = split * partial_rows + query_row
    tl.store(lse_ptr + at_partial, lse, mask=is_query)
    tl.store(
        partial_ptr + at_partial[:, None] * DIM + columns[None, :], out, mask=is_query[:, None]
    )


@triton.jit
def _merge_splits(
    partial_ptr,
    lse_ptr,
    out_ptr,
    start_ptr,
    first_ptr,
    partial_rows,
    rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, ROWS)
    ends = tl.load(first_ptr + 1 + other, mask=other < rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    if row >= rows:
        return  # a token of no row
    count = tl.load(first_ptr + row + 1) - tl.load(first_ptr + row)
    keys = tl.load(start_ptr + row) + count
    columns = tl.arange(0, DIM)
    query_row = token.to(tl.int64) * HEADS + head
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    out = tl.zeros((DIM,), tl.float32)
    for split in range((keys + SPLIT - 1) // SPLIT):  # in order: the same sum every time
        lse = tl.load(lse_ptr + split * partial_rows + query_row + tl.arange(0, 1))
        greatest = tl.maximum(best, lse)
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        shrink, weight = tl.exp2(best - base), tl.exp2(lse - base)
        part = tl.load(partial_ptr + (split * partial_rows + query_row) * DIM + columns)
        out = out * shrink + part * weight
        total = total * shrink + weight
        best = greatest
    tl.store(out_ptr + query_row * DIM + columns, (out / total).to(out_ptr.dtype.element_ty))


TILE_TOKENS, MAX_LANES = 128, 32
"""Tokens that a program reads at a time, and its query lanes. With 64 lanes Triton picks another
tensor-core instruction, and a row's bits would depend on the number of its new tokens.
"""


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    first: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    most: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    split: int | None = None,
    tile: int = TILE_TOKENS,
    warps: int = 4,
    max_lanes: int = MAX_LANES,
) -> torch.Tensor:
    """Return the attention of queries ``q`` [tokens, heads, dim], same shape.

    ``kv`` is [blocks, 2, kv_heads, page, dim], ``table`` int32[rows, blocks of the longest row],
    ``start`` int32[rows], ``first`` int32[rows + 1], ``ancestors`` int64[tokens]. ``most`` bounds
    the new tokens of a row. ``window`` (0: none) is a sliding window in tokens, ``softcap`` (0:
    none) bounds the scores. The result for tokens of no row is undefined.

    ``split`` (None: ``split_tokens``) is a multiple of ``tile``; of that and the page one is a
    multiple of the other.
    """
    rows, heads = len(start), q.shape[1]
    _, _, kv_heads, page, dim = kv.shape
    keys = table.shape[1] * page
    split = split or split_tokens(keys)
    group, splits = heads // kv_heads, triton.cdiv(keys, split)
    block_q = min(most, max(1, max_lanes // group))
    out = torch.empty_like(q)
    partial = q.new_empty(splits, len(q) * heads, dim, dtype=torch.float32)
    lse = q.new_empty(splits, len(q) * heads, dtype=torch.float32)
    lanes = max(16, triton.next_power_of_2(block_q * group))
    cut = {"DIM": dim, "SPLIT": split}
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "PAGE": page, **cut}
    ways = {"BLOCK_Q": block_q, "BLOCK_M": lanes, "TILE": tile, "WINDOW": window}
    ways |= {"SOFTCAP": softcap, "num_warps": warps, "num_stages": 3}
    read, partials = (q, kv, table, start, first, ancestors), (partial, lse)
    grid = rows, kv_heads * triton.cdiv(most, block_q), splits
    _attend_split[grid](*read, *partials, scale, table.stride(0), lse.shape[1], **shape, **ways)
    merged = {"ROWS": triton.next_power_of_2(rows), "HEADS": heads, **cut, "num_warps": 1}
    _merge_splits[(len(q), heads)](*partials, out, start, first, lse.shape[1], rows, **merged)
    return out
