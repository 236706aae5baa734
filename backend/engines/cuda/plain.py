"""The engine's kernels in plain torch, for devices without Triton: same arguments, same results."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from backend.sampling.draw import draw


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    wide: bool = False,
) -> torch.Tensor:
    """As ``layers.add_rms_norm``."""
    if x is not None:
        residual += x
    normed = functional.rms_norm(residual.float(), (residual.shape[-1],), eps=eps)
    scaled = normed * weight.float() if wide else normed.to(residual.dtype) * weight
    return out.copy_(scaled)


def rotate_and_store(
    qkv: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    place: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
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
            functional.rms_norm(x.float(), (dim,), eps=eps).to(x.dtype) * weight
            for x, weight in ((queries, q_norm), (keys, k_norm))
        )
    queries, keys = (_rotated(x, cos, sin, rotary) for x in (queries, keys))
    q.copy_(queries)
    block, offset = (place // page).long(), (place % page).long()
    kv[block, 0, :, offset] = keys
    kv[block, 1, :, offset] = values


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    half = rotary // 2
    low, high, rest = torch.split(x.float(), [half, half, x.shape[-1] - rotary], -1)
    cos, sin = (angle[:, None, :half].float() for angle in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1).to(x.dtype)


def gated(x: torch.Tensor, out: torch.Tensor, *, gelu: bool = False) -> None:
    """As ``layers.gated``."""
    gate, up = x.chunk(2, -1)
    wide = gate.float()
    activated = functional.gelu(wide, approximate="tanh") if gelu else functional.silu(wide)
    out.copy_(activated.to(up.dtype) * up)


class Attention:
    """As ``attention.PagedAttention``, row by row."""

    def __init__(self, *, window: int = 0, softcap: float = 0.0, **_: object) -> None:
        self._window, self._softcap = window, softcap

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        table: torch.Tensor,
        start: torch.Tensor,
        first: torch.Tensor,
        ancestors: torch.Tensor,
        out: torch.Tensor,
        *,
        most: int,
        scale: float,
    ) -> torch.Tensor:
        """As ``attention.PagedAttention``."""
        del most  # the bucket's bound; ``first`` says how many there are
        kv_heads, page, dim = kv.shape[2:]
        group = q.shape[1] // kv_heads
        for row, committed in enumerate(start.tolist()):
            begin, end = int(first[row]), int(first[row + 1])
            keys = committed + end - begin
            pages = kv[table[row, : -(-keys // page)].long()]
            k, v = (
                pages[:, which]
                .transpose(0, 1)
                .reshape(kv_heads, -1, dim)[:, :keys]
                .repeat_interleave(group, 0)
                for which in (0, 1)
            )
            scores = torch.einsum("qhd,hkd->hqk", q[begin:end], k).float() * scale
            if self._softcap:
                scores = torch.tanh(scores / self._softcap) * self._softcap
            seen = self._seen(ancestors[begin:end], committed)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
            out[begin:end] = torch.einsum("hqk,hkd->qhd", weights, v)
        return out

    def _seen(self, words: torch.Tensor, committed: int) -> torch.Tensor:
        """Return which keys each new token sees, bool[new, committed + new]."""
        new = torch.arange(len(words), device=words.device)
        own = ((words[:, None] >> new) & 1).bool()
        old = own.new_ones(len(words), committed)
        if self._window:
            position = committed + own.sum(-1) - 1
            age = position[:, None] - torch.arange(committed, device=words.device)
            old &= age < self._window
        return torch.cat((old, own), 1)


class Draw:
    """As ``draw.Draw``, by the host's own draw."""

    def __init__(self, rows: int, vocab: int, device: str | torch.device) -> None:
        del rows, vocab, device  # no buffers are needed

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        bound: torch.Tensor,
        words: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """As ``draw.Draw``."""
        drawn, is_broken = logits.argmax(-1), logits.isnan().any(-1)
        drawn[is_broken] = -1
        for row in ((temperature > 0.0) & ~is_broken).nonzero()[:, 0].tolist():
            scores = logits[row].float().masked_fill(logits[row] < bound[row], -torch.inf)
            law = ((scores - scores.max()) / temperature[row]).softmax(-1)
            word = words[row : row + 1].cpu().numpy().view(np.uint64)
            drawn[row] = draw(law[None], word)[0]
        return tokens.copy_(drawn)
