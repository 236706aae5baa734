"""Keys and values in pages, and the one attention function that transformers' modules call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface

from backend.engines.cuda.prompts import PAGE, Prompts, Scoring, choose

__all__ = ["ATTENTION", "PAGE", "Layout", "Pages", "Scoring"]

ATTENTION = "spindle_paged"
"""The name under which transformers knows the attention function."""


@dataclass
class Layout:
    """What the attention of a pass reads, for rows of new tokens packed one after the other.

    ``table`` int32[rows, blocks], ``start`` int32[rows] committed tokens, ``first``
    int32[rows + 1], ``ancestors`` int64[tokens] (``ancestors.py``), ``place`` int32[tokens] block
    times page plus offset. ``most`` bounds the new tokens of a row, ``keys`` all of its tokens.
    ``prompts`` are the rows of a pass of prompts, else None.
    """

    table: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    place: torch.Tensor
    most: int
    keys: int
    prompts: Prompts | None = None


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
        if layout.prompts is not None:
            attend = choose(self.kv, self.heads, scoring)[1]
            return attend(q, self.kv, layout.prompts, scoring)
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
