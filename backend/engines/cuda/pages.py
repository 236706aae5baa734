"""Keys and values in pages, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.engines.cuda.prompts import PAGE, Prompts, Scoring, choose

__all__ = ["PAGE", "Layout", "Pages", "Scoring"]


@dataclass
class Layout:
    """Inputs of the attention of a pass, for rows of new tokens packed one after the other.

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
