"""Keys and values in pages, attention over them, and ancestor words: which of a row's new tokens
each of them may see, a bit for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.engines.cuda.prompts import PAGE, PromptPass, Scoring, choose

__all__ = ["MAX_NEW_TOKENS", "PAGE", "Pages", "PassLayout", "Scoring", "ancestor_words"]

MAX_NEW_TOKENS = 64
"""New tokens of a row in one pass: bits of an ancestor word."""


def ancestor_words(parents: list[int]) -> list[int]:
    """Return the ancestor words of a row's new tokens, as signed 64-bit integers.

    Token 0 is the row's last committed token; token n + 1 is node n, whose parent is node
    ``parents[n]``, or token 0 where that is -1. A chain is ``[-1, 0, 1, ...]``.

    Raises ValueError for more than ``MAX_NEW_TOKENS`` tokens.
    """
    if len(parents) >= MAX_NEW_TOKENS:
        raise ValueError(f"{len(parents)} nodes: a row has at most {MAX_NEW_TOKENS - 1}")
    words = [1]
    for node, parent in enumerate(parents):
        words.append(words[parent + 1] | 1 << node + 1)
    return [word - (1 << 64) if word >> 63 else word for word in words]


def row_pages(max_context_tokens: int, max_draft_tokens: int) -> int:
    """Return the pages of the longest row: each of two turns under way may write as far as its
    drafts go, and a table may have some to spare.
    """
    return -(-(max_context_tokens + 2 * (max_draft_tokens + 1)) // PAGE) + 2


_SPLIT_TOKENS, _MOST_SPLITS = 512, 64


def split_tokens(keys: int) -> int:
    """Return the tokens of the pieces that a context is cut into, where the longest has ``keys``:
    the same for all passes of an engine, so that a row has the same bits in each of them.
    """
    return _SPLIT_TOKENS * -(-keys // (_SPLIT_TOKENS * _MOST_SPLITS))


def partial_bytes(tokens: int, heads: int, dim: int, keys: int) -> int:
    """Return what attention takes for the results of a layer's pieces of a context: of each a
    vector and its weight.
    """
    return -(-keys // split_tokens(keys)) * tokens * heads * (dim + 1) * 4


@dataclass
class PassLayout:
    """Inputs of the attention of a pass, for rows of new tokens packed one after the other."""

    table: torch.Tensor  # int32[rows, blocks], with room for the longest row
    start: torch.Tensor  # int32[rows], committed tokens
    first: torch.Tensor  # int32[rows + 1]
    ancestors: torch.Tensor  # int64[tokens]
    place: torch.Tensor  # int32[tokens], block times page plus offset
    most: int
    """New tokens of a row at the most."""
    prompts: PromptPass | None = None
    """The rows of a pass of prompts."""


class Pages:
    """One layer's ``kv`` [blocks, 2, kv_heads, PAGE, dim], as its attention module finds it.

    ``layout`` returns the pass's layout. ``scoring`` is what the module last gave to the attention
    function.
    """

    def __init__(
        self,
        kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
        heads: int,
        layout: Callable[[], PassLayout],
        attention: Callable[..., torch.Tensor],  # returns [tokens, heads, dim]
    ) -> None:
        self.kv, self.heads, self.layout = kv, heads, layout
        self._attention = attention
        self.scoring = Scoring(0.0)

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [tokens, kv_heads, dim] to their places.

        A value that is NaN is written as 0: a token without numbers must not reach those that do
        not see it (0 times NaN is NaN). Those that do have NaN by its key.
        """
        place = self.layout().place.long()
        block, offset = place // PAGE, place % PAGE
        self.kv[block, 0, :, offset] = key
        self.kv[block, 1, :, offset] = value.where(value == value, 0.0)

    def attend(self, q: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return the attention of queries [tokens, heads, dim], same shape."""
        layout = self.layout()
        if layout.prompts is not None:
            attend = choose(self.kv, self.heads, scoring)[1]
            return attend(q, self.kv, layout.prompts, scoring)
        read = layout.table, layout.start, layout.first, layout.ancestors
        return self._attention(q, self.kv, *read, most=layout.most, **scoring._asdict())
