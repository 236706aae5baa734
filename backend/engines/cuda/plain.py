"""The engine's kernels in plain torch, for devices without Triton, with the same arguments. And a
request's own noise, as ``sampling.randomness`` defines it, for torch on any device.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch.nn import functional

from backend.engines.cuda.pages import ancestor_words
from backend.engines.models.arrays import to_array
from backend.engines.spine import CANDIDATES
from backend.request import SamplingParams
from backend.sampling import draw as host
from backend.sampling.distributions import FAINT, target_probs


def add_rms_norm(
    x: torch.Tensor | None,  # [tokens, hidden]
    residual: torch.Tensor,  # [tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    out: torch.Tensor,  # [tokens, hidden]
    *,
    wide: bool = False,
) -> torch.Tensor:
    """As ``layers.add_rms_norm``."""
    if x is not None:
        residual += x
    normed = functional.rms_norm(_wide(residual), (residual.shape[-1],), eps=eps)
    scaled = normed * _wide(weight) if wide else normed.to(residual.dtype) * weight
    return out.copy_(scaled)


def rotate_and_store(
    qkv: torch.Tensor,  # [tokens, (heads + 2 kv_heads) dim]
    q: torch.Tensor,  # [tokens, heads, dim]
    kv: torch.Tensor,  # [blocks, 2, kv_heads, page, dim]
    cos: torch.Tensor,  # [tokens, rotary]
    sin: torch.Tensor,  # [tokens, rotary]
    place: torch.Tensor,  # int32[tokens]
    *,
    q_norm: torch.Tensor | None = None,  # [dim]
    k_norm: torch.Tensor | None = None,  # [dim]
    eps: float = 0.0,
) -> None:
    """As ``layers.rotate_and_store``."""
    _, _, kv_heads, page, dim = kv.shape
    tokens, heads, _ = q.shape
    rotary = cos.shape[-1]
    parts = qkv.view(tokens, -1, dim)
    queries, keys, values = torch.split(parts, [heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        queries, keys = (
            functional.rms_norm(_wide(x), (dim,), eps=eps).to(x.dtype) * weight
            for x, weight in ((queries, q_norm), (keys, k_norm))
        )
    queries, keys = (_rotate(x, cos, sin, rotary) for x in (queries, keys))
    q.copy_(queries)
    block, offset = (place // page).long(), (place % page).long()
    kv[block, 0, :, offset] = keys
    kv[block, 1, :, offset] = values.where(values == values, 0.0)


def _rotate(
    x: torch.Tensor,  # [tokens, heads, dim]
    cos: torch.Tensor,  # [tokens, rotary]
    sin: torch.Tensor,  # [tokens, rotary]
    rotary: int,
) -> torch.Tensor:
    half = rotary // 2
    low, high, rest = torch.split(_wide(x), [half, half, x.shape[-1] - rotary], -1)
    cos, sin = (_wide(angle[:, None, :half]) for angle in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1).to(x.dtype)


def apply_gate(
    x: torch.Tensor,  # [tokens, 2 inner]
    out: torch.Tensor,  # [tokens, inner]
    *,
    gelu: bool = False,
) -> None:
    """As ``layers.apply_gate``."""
    gate, up = x.chunk(2, -1)
    wide = _wide(gate)
    activated = functional.gelu(wide, approximate="tanh") if gelu else functional.silu(wide)
    out.copy_(activated.to(up.dtype) * up)


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    kv: torch.Tensor,  # [blocks, 2, kv_heads, page, dim]
    table: torch.Tensor,  # int32[rows, blocks]
    start: torch.Tensor,  # int32[rows]
    first: torch.Tensor,  # int32[rows + 1]
    ancestors: torch.Tensor,  # int64[tokens]
    *,
    most: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As ``attention.attention``, row by row. Raises IndexError where a row has more tokens than
    the kernel would read.
    """
    kv_heads, page, dim = kv.shape[2:]
    group, out = q.shape[1] // kv_heads, torch.zeros_like(q)
    for row, committed in enumerate(start.tolist()):
        begin, end = int(first[row]), int(first[row + 1])
        count, room = committed + end - begin, table.shape[1] * page
        if count > room or end - begin > most:
            raise IndexError(
                f"row {row} has {count} tokens, {end - begin} of them new: the pass has room for "
                f"{room} and {most}"
            )
        pages = kv[table[row, : -(-count // page)].long()]
        k, v = (
            pages[:, which]
            .transpose(0, 1)
            .reshape(kv_heads, -1, dim)[:, :count]
            .repeat_interleave(group, 0)
            for which in (0, 1)
        )
        scores = _wide(torch.einsum("qhd,hkd->hqk", q[begin:end], k)) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        is_visible = _visible_keys(ancestors[begin:end], committed, window)
        weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1).to(v.dtype)
        out[begin:end] = torch.einsum("hqk,hkd->qhd", weights, v)
    return out


def _visible_keys(words: torch.Tensor, committed: int, window: int) -> torch.Tensor:
    """Return which keys each new token sees by its ancestor word, int64[new]: bool[new, committed +
    new].
    """
    new = torch.arange(len(words), device=words.device)
    is_ancestor = ((words[:, None] >> new) & 1).bool()
    old = is_ancestor.new_ones(len(words), committed)
    if window:
        position = committed + is_ancestor.sum(-1) - 1
        age = position[:, None] - torch.arange(committed, device=words.device)
        old &= age < window
    return torch.cat((old, is_ancestor), 1)


def draw(
    logits: torch.Tensor,  # [rows, vocab]
    temperature: torch.Tensor,  # float32[rows]
    bound: torch.Tensor,  # float32[rows]
    words: torch.Tensor,  # int64[rows]
) -> torch.Tensor:
    """As ``draw.draw``, by the host's own draw."""
    tokens, is_broken = logits.argmax(-1), ~logits.amax(-1).isfinite()
    tokens[is_broken] = -1
    for row in ((temperature > 0.0) & ~is_broken).nonzero()[:, 0].tolist():
        scores = _wide(logits[row]).masked_fill(logits[row] < bound[row], -torch.inf)
        probs = to_array(((scores - scores.max()) / temperature[row]).softmax(-1)[None])
        word = words[row : row + 1].cpu().numpy().view(np.uint64)
        tokens[row] = host.draw(probs.__getitem__, word)[0]
    return tokens.int()


def bounds(
    logits: torch.Tensor,  # [rows, vocab]
    temperature: torch.Tensor,  # float32[rows]
    top_k: torch.Tensor,  # int32[rows]
    top_p: torch.Tensor,  # float32[rows]
    min_p: torch.Tensor,  # float32[rows]
) -> torch.Tensor:
    """As ``bounds.bounds``, by the host's own distributions."""
    bound = torch.full_like(temperature, -torch.inf, dtype=_wide(logits).dtype)
    columns = (column.tolist() for column in (temperature, top_k, top_p, min_p))
    for row, (heat, k, p, least) in enumerate(zip(*columns, strict=True)):
        if heat > 0.0 and logits[row].amax().isfinite():  # else the draw says that it is broken
            params = SamplingParams(temperature=heat, top_k=k, top_p=p, min_p=least)
            probs = target_probs(to_array(logits[row]), params)
            out = torch.from_numpy(probs == 0.0).to(logits.device)
            bound[row] = logits[row].masked_fill(out, torch.inf).min()
    return bound


def candidates(
    logits: torch.Tensor,  # [rows, columns]
    tokens: torch.Tensor,  # int64[rows, columns]
    temperature: torch.Tensor,  # float32[rows]
    bound: torch.Tensor,  # float32[rows]
    words: torch.Tensor,  # int64[rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``candidates.candidates``."""
    is_sampled = (temperature > 0.0)[:, None]
    scores = _wide(logits)
    scores = scores.masked_fill(scores < bound[:, None], -torch.inf)
    heat = torch.where(is_sampled, temperature[:, None], 1.0)
    mass = ((scores - scores.amax(1, keepdim=True)) / heat).softmax(1)
    times = exponentials(words[:, None] ^ tokens) / mass
    speed = torch.where(mass >= host.HEAD, times**-host.SHARPNESS, 0.0)
    worth = torch.where(is_sampled, speed, mass.double())
    best = worth.topk(CANDIDATES)
    chance = best.values / worth.sum(1, keepdim=True).clamp(min=1e-300)
    is_out = (~is_sampled & (chance < FAINT * chance[:, :1])) | chance.isnan()
    return tokens.gather(1, best.indices), chance.masked_fill(is_out, 0.0).float()


def pack(
    is_verified: torch.Tensor,  # int32[rows, columns]
    token: torch.Tensor,  # int64[rows, columns]
    parent: torch.Tensor,  # int32[rows, columns]
    length: torch.Tensor,  # int64[rows]
    last: torch.Tensor,  # int64[rows]
    table: torch.Tensor,  # int32[rows, blocks]
    first: torch.Tensor,  # int32[rows + 1]
    *outputs: torch.Tensor,  # six of [tokens]
    page: int,
    scratch: int,
) -> None:
    """As ``trees.pack``."""
    ids, position, ancestors, place, origin, owner = outputs
    for column, rest in zip(outputs, (0, 0, 0, scratch, -1, 0), strict=True):
        column.fill_(rest)
    for row, start in enumerate(length.tolist()):
        nodes = is_verified[row].nonzero()[:, 0].tolist()
        local = {-1: 0} | {node: at + 1 for at, node in enumerate(nodes)}
        origins = [-1, *(local[int(parent[row, node])] for node in nodes)]
        words = ancestor_words([origin - 1 for origin in origins[1:]])
        tokens = [int(last[row]), *token[row, nodes].tolist()]
        for at, (node_token, word, above) in enumerate(zip(tokens, words, origins, strict=True)):
            to = int(first[row]) + at
            ids[to], ancestors[to], origin[to], owner[to] = node_token, word, above, row
            position[to] = start + bin(word % (1 << 64)).count("1") - 1
            block = int(table[row, (start + at) // page])
            place[to] = block * page + (start + at) % page


def walk(
    tokens: torch.Tensor,  # int32[tokens]
    ids: torch.Tensor,  # int64[tokens]
    origin: torch.Tensor,  # int32[tokens]
    first: torch.Tensor,  # int32[rows + 1]
    emitted: torch.Tensor,  # int64[rows, most]
    path: torch.Tensor,  # int32[rows, most]
    count: torch.Tensor,  # int64[rows]
    *,
    places: int,
) -> None:
    """As ``trees.walk``."""
    del places  # ``first`` says how many there are
    node_ids, above, begins = ids.tolist(), origin.tolist(), first.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(begins)):
        at, steps = 0, 0
        while True:
            token = int(tokens[begin + at])
            emitted[row, steps], path[row, steps] = token, at
            steps += 1
            children = (
                child
                for child in range(1, end - begin)
                if above[begin + child] == at and node_ids[begin + child] == token
            )
            child = next(children, None)
            if child is None or steps == emitted.shape[1]:
                break
            at = child
        count[row] = steps


def move(
    kv: torch.Tensor,  # [layers, blocks, 2, kv_heads, page, dim]
    table: torch.Tensor,  # int32[rows, blocks]
    start: torch.Tensor,  # int32[rows]
    path: torch.Tensor,  # int32[rows, most]
    count: torch.Tensor,  # int64[rows]
) -> None:
    """As ``trees.move``."""
    page = kv.shape[4]
    for row, steps in enumerate(count.tolist()):
        begin = int(start[row])
        for step, local in enumerate(path[row, :steps].tolist()):
            source, target = begin + local, begin + step
            block, to_block = (int(table[row, at // page]) for at in (source, target))
            kv[:, to_block, :, :, target % page] = kv[:, block, :, :, source % page]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return float64[...] as it is, other values as float32[...]."""
    return x if x.dtype == torch.float64 else x.float()


_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mix(word: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finaliser of the bits of int64[...]."""
    word = word + _GOLDEN
    word = (word ^ _shift(word, 30)) * _FIRST
    word = (word ^ _shift(word, 27)) * _SECOND
    return word ^ _shift(word, 31)


def exponentials(words: torch.Tensor) -> torch.Tensor:
    """Return a standard exponential, float64[...], for the bits of each word int64[...]."""
    return -torch.log((_shift(mix(words), 11).double() + 0.5) * 2.0**-53)


def _shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64[...] right with zeros from the left, which torch's does not."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
