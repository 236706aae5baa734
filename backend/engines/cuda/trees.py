"""Proposals of a whole batch on the device: which nodes are verified, where they lie in the pass,
which of them the draw accepts, and their KV moved to where the text has them.

A row's proposal is a tree of nodes in columns, a parent before its children. In a pass a row owns
consecutive places: its last token at local place 0, then its chosen nodes in the order of their
columns. All shapes are fixed, and no value is read by the host, so that a CUDA graph may capture
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)


def choose(chance: torch.Tensor, budget: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """Return which nodes of ``chance`` [rows, columns] are verified, int32 of the same shape: the
    ``budget`` likeliest of the batch, the first of equals; none of chance 0. A row has ``room``
    int32[rows] for some of its likeliest (None: for all).

    ``chance`` is the probability of a node's whole path. It never rises from a parent to a child,
    so that a chosen node's parent is chosen, too.
    """
    if room is not None:
        best = chance.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(chance.shape[1], device=chance.device)
        chance = torch.zeros_like(chance).scatter_(
            1, best.indices, best.values.where(rank < room[:, None], 0.0)
        )
    flat = chance.flatten()
    order = flat.sort(descending=True, stable=True)
    is_verified = torch.zeros(len(flat), dtype=torch.int32, device=chance.device)
    likely = (order.values[:budget] > 0.0).int()
    return is_verified.scatter_(0, order.indices[:budget], likely).view_as(chance)


@triton.jit
def _pack(
    verified_ptr,
    token_ptr,
    parent_ptr,
    length_ptr,
    last_ptr,
    table_ptr,
    first_ptr,
    ids_ptr,
    position_ptr,
    ancestors_ptr,
    place_ptr,
    origin_ptr,
    owner_ptr,
    rows,
    columns,
    tokens,
    table_stride,
    scratch,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(first_ptr + row)
    if row == rows:  # places that no row owns
        for begin in range(0, tokens, REST):
            at = begin + tl.arange(0, REST)
            is_rest = (at >= first) & (at < tokens)
            zero = tl.zeros((REST,), tl.int64)
            tl.store(ids_ptr + at, zero, mask=is_rest)
            tl.store(position_ptr + at, zero, mask=is_rest)
            tl.store(ancestors_ptr + at, zero, mask=is_rest)
            tl.store(place_ptr + at, tl.zeros((REST,), tl.int32) + scratch, mask=is_rest)
            tl.store(origin_ptr + at, tl.zeros((REST,), tl.int32) - 1, mask=is_rest)
            tl.store(owner_ptr + at, tl.zeros((REST,), tl.int32), mask=is_rest)
        return
    column = tl.arange(0, BLOCK)
    at = row * columns + column
    exists = column < columns
    is_verified = tl.load(verified_ptr + at, mask=exists, other=0)
    parent = tl.load(parent_ptr + at, mask=exists, other=-1)
    local = tl.cumsum(is_verified, 0)
    is_parent = parent[:, None] == column[None, :]
    origin = tl.sum(tl.where(is_parent, local[None, :], 0), 1)
    word = (tl.full((BLOCK,), 1, tl.int64) << local.to(tl.int64)) * is_verified
    depth = tl.full((BLOCK,), 1, tl.int32)
    jump = parent
    for _ in tl.static_range(DOUBLINGS):  # of the distance to the ancestor that is looked at
        is_above = jump[:, None] == column[None, :]
        word = word | tl.sum(tl.where(is_above, word[None, :], 0), 1)
        depth += tl.sum(tl.where(is_above, depth[None, :], 0), 1)
        jump = tl.where(jump < 0, -1, tl.sum(tl.where(is_above, jump[None, :], 0), 1))
    length = tl.load(length_ptr + row)
    table = table_ptr + row * table_stride
    token = tl.load(token_ptr + at, mask=exists, other=0)
    is_node = exists & (is_verified > 0)
    to = first + local
    place = length + local
    block = tl.load(table + place // PAGE, mask=is_node, other=0)
    tl.store(ids_ptr + to, token, mask=is_node)
    tl.store(position_ptr + to, length + depth, mask=is_node)
    tl.store(ancestors_ptr + to, word | 1, mask=is_node)
    tl.store(place_ptr + to, block * PAGE + (place % PAGE).to(tl.int32), mask=is_node)
    tl.store(origin_ptr + to, origin, mask=is_node)
    tl.store(owner_ptr + to, tl.zeros((BLOCK,), tl.int32) + row, mask=is_node)
    tl.store(ids_ptr + first, tl.load(last_ptr + row))
    tl.store(position_ptr + first, length)
    tl.store(ancestors_ptr + first, tl.full((), 1, tl.int64))
    last_place = tl.load(table + length // PAGE) * PAGE + (length % PAGE).to(tl.int32)
    tl.store(place_ptr + first, last_place)
    tl.store(origin_ptr + first, -1)
    tl.store(owner_ptr + first, row)


def pack(
    is_verified: torch.Tensor,
    token: torch.Tensor,
    parent: torch.Tensor,
    length: torch.Tensor,
    last: torch.Tensor,
    table: torch.Tensor,
    first: torch.Tensor,
    *outputs: torch.Tensor,
    page: int,
    scratch: int,
) -> None:
    """Lay out a pass: write its ids, positions and ancestor words, int64[tokens], then the places
    of its KV, ``origin`` and ``owner``, int32[tokens].

    ``is_verified``, ``parent`` (a column, -1: the text) int32 and ``token`` int64 are
    [rows, columns]; ``length`` int64[rows] tokens have KV, then ``last`` int64[rows]; ``table``
    int32[rows, blocks]; ``first`` int32[rows + 1] is each row's first place. ``origin`` is the
    local place of a node's parent, -1 at local place 0; ``owner`` is the row. Places that no row
    owns get ``scratch`` for their KV, and row 0.
    """
    rows, columns = is_verified.shape
    read = is_verified, token, parent, length, last, table, first
    size = rows, columns, len(outputs[0]), table.stride(0), scratch
    block, doublings = max(2, triton.next_power_of_2(columns)), max(1, columns.bit_length())
    shape = {"PAGE": page, "BLOCK": block, "DOUBLINGS": doublings, "REST": 256}
    _pack[(rows + 1,)](*read, *outputs, *size, **shape, num_warps=4 if columns <= 32 else 16)


@triton.jit
def _walk(
    drawn_ptr,
    ids_ptr,
    origin_ptr,
    first_ptr,
    emitted_ptr,
    path_ptr,
    count_ptr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(first_ptr + row)
    owned = tl.load(first_ptr + row + 1) - first
    local = tl.arange(0, BLOCK)
    is_node = (local > 0) & (local < owned)
    ids = tl.load(ids_ptr + first + local, mask=is_node, other=-2)
    origin = tl.load(origin_ptr + first + local, mask=is_node, other=-2)
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    is_going = tl.full((), 1, tl.int32)
    for step in tl.static_range(MOST):
        token = tl.load(drawn_ptr + first + at).to(tl.int64)
        tl.store(emitted_ptr + row * MOST + step, token, mask=is_going > 0)
        tl.store(path_ptr + row * MOST + step, at, mask=is_going > 0)
        count += is_going
        child = tl.min(tl.where(is_node & (origin == at) & (ids == token), local, _NONE), 0)
        is_going = tl.where(child == _NONE, 0, is_going)
        at = tl.where(is_going > 0, child, at)
    tl.store(count_ptr + row, count.to(tl.int64))


def walk(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    origin: torch.Tensor,
    first: torch.Tensor,
    emitted: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
    *,
    places: int,
) -> None:
    """Follow what the target drew: write ``emitted`` int64[rows, most], ``path`` int32[rows, most]
    and ``count`` int64[rows].

    ``tokens`` int32[tokens] are drawn at the places of a pass; ``ids`` int64[tokens], ``origin``
    int32[tokens] and ``first`` int32[rows + 1] are as in ``pack``. A row owns at most ``places``.
    A row's first ``count`` tokens of ``emitted`` are its text's, drawn at the local places of
    ``path``; the rest is undefined.
    """
    rows, most = emitted.shape
    shape = {"MOST": most, "BLOCK": max(2, triton.next_power_of_2(places)), "num_warps": 1}
    _walk[(rows,)](tokens, ids, origin, first, emitted, path, count, **shape)


@triton.jit
def _move(
    kv_ptr,
    table_ptr,
    start_ptr,
    path_ptr,
    count_ptr,
    table_stride,
    layer_stride,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
):
    row, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + row).to(tl.int32)
    start = tl.load(start_ptr + row)
    table = table_ptr + row * table_stride
    column = tl.arange(0, DIM)
    base = kv_ptr + layer.to(tl.int64) * layer_stride
    # In the path's order: a node moves down, at most to where one before it on the path was.
    for step in range(1, MOST):
        source = tl.load(path_ptr + row * MOST + step, mask=step < count, other=step)
        if source != step:
            source += start
            target = start + step
            from_block = tl.load(table + source // PAGE).to(tl.int64)
            to_block = tl.load(table + target // PAGE).to(tl.int64)
            from_tile = (from_block * PARTS + part) * PAGE + source % PAGE
            to_tile = (to_block * PARTS + part) * PAGE + target % PAGE
            tl.store(base + to_tile * DIM + column, tl.load(base + from_tile * DIM + column))


def move(
    kv: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Move the KV of accepted nodes to the places that their tokens have in the text.

    ``kv`` is [layers, blocks, 2, kv_heads, page, dim]; ``table`` int32[rows, blocks of a row] and
    ``start`` int32[rows] are those of the pass, ``path`` and ``count`` as ``walk`` writes them.
    """
    layers, _, sides, kv_heads, page, dim = kv.shape
    rows, most = path.shape
    if most == 1:
        return
    parts = sides * kv_heads
    shape = {"MOST": most, "PARTS": parts, "PAGE": page, "DIM": dim, "num_warps": 1}
    strides = table.stride(0), kv.stride(0)
    _move[(rows, layers, parts)](kv, table, start, path, count, *strides, **shape)
