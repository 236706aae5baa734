"""Keys and values in pages, and the one attention function that transformers' modules call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

PAGE = 32
"""Tokens of a KV page."""

ATTENTION = "spindle_paged"
"""The name under which transformers knows the attention function."""


@dataclass
class Layout:
    """What the attention of a pass reads, for rows of new tokens packed one after the other.

    ``table`` int32[rows, blocks], ``start`` int32[rows] committed tokens, ``first``
    int32[rows + 1], ``ancestors`` int64[tokens] (``ancestors.py``), ``place`` int32[tokens] block
    times page plus offset. ``most`` bounds the new tokens of a row, ``keys`` all of its tokens.
    ``spans`` are each row's committed and new tokens as the host knows them, for prompts: such a
    pass is causal, of any length, and is not captured.
    """

    table: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    place: torch.Tensor
    most: int
    keys: int
    spans: list[tuple[int, int]] | None = None


class Scoring(NamedTuple):
    """How scores are made: their scale, a sliding window in tokens and a cap (0: none)."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class Pages:
    """One layer's ``kv`` [blocks, 2, kv_heads, PAGE, dim], as its attention module finds it.

    ``layout`` returns the pass's layout. ``scoring`` is what the module last gave to the attention
    function.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        heads: int,
        layout: Callable[[], Layout],
        attention: Callable[..., torch.Tensor],
    ) -> None:
        self.kv, self.heads, self.layout = kv, heads, layout
        self._attention = attention
        self.scoring = Scoring(0.0)

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [tokens, kv_heads, dim] to their places."""
        place = self.layout().place.long()
        block, offset = place // PAGE, place % PAGE
        self.kv[block, 0, :, offset] = key
        self.kv[block, 1, :, offset] = value

    def attend(self, q: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return the attention of queries [tokens, heads, dim], same shape."""
        layout = self.layout()
        if layout.spans is not None:
            return self._attend_causally(q, layout.table, layout.spans, scoring)
        return self._attention(
            q,
            self.kv,
            layout.table,
            layout.start,
            layout.first,
            layout.ancestors,
            most=layout.most,
            keys=layout.keys,
            **scoring._asdict(),
        )

    def _attend_causally(
        self,
        q: torch.Tensor,
        table: torch.Tensor,
        spans: list[tuple[int, int]],
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend row by row over gathered pages, by torch."""
        _, _, kv_heads, _, dim = self.kv.shape
        at, out = 0, torch.empty_like(q)
        for row, (committed, new) in enumerate(spans):
            keys = committed + new
            pages = self.kv[table[row, : -(-keys // PAGE)].long()]
            k, v = (
                pages[:, which].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :keys]
                for which in (0, 1)
            )
            position = torch.arange(committed, keys, device=q.device)
            age = position[:, None] - torch.arange(keys, device=q.device)
            seen = (age >= 0) & (age < (scoring.window or keys))
            queries = q[at : at + new].transpose(0, 1)
            out[at : at + new] = _attend_over(queries, k, v, seen, scoring).transpose(0, 1)
            at += new
        return out


def _attend_over(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Return the attention [heads, new, dim] of one row."""
    if not scoring.softcap:
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scoring.scale, enable_gqa=True
        )[0]
    group = len(q) // len(k)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(1, 2) * (scoring.scale / scoring.softcap))
    weights = (scores.float() * scoring.softcap).masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Store and attend: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim];
    returns [1, tokens, heads, dim].

    Raises NotImplementedError for attention sinks.
    """
    del attention_mask  # rows and ancestor words say what a token sees
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not served")
    pages = module.pages
    assert isinstance(pages, Pages)
    pages.store(key[0].transpose(0, 1), value[0].transpose(0, 1))
    window = sliding_window or getattr(module, "sliding_window", None) or 0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pages.scoring = Scoring(scale, window, softcap or 0.0)
    q = query[0].transpose(0, 1).contiguous()
    return pages.attend(q, pages.scoring)[None], None


AttentionInterface.register(ATTENTION, _attend)
