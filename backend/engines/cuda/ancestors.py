"""Ancestor words: which of a row's new tokens each of them may see, a bit for each."""

from __future__ import annotations

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
