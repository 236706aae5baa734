"""Request decomposition (SPIN, arXiv 2503.15921): uneven contexts of a padding engine cut into pieces of one length.

An engine that pads reads max_i n_i cached tokens for each of B rows. Cut into pieces of L tokens it reads L for each piece, and the pieces'
partial outputs are merged exactly by log-sum-exp. The paper's objective is not public; this one is what it says in words:

    least of (L + c) sum_i ceil(n_i / L) over L, and of B max_i n_i uncut

with c the price of merging a piece, in tokens read. An engine with ragged attention reads sum_i n_i anyway: it has nothing to gain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .plan import IntArray
from .shapes import CHAINS_ONLY, NOT_LONGER, PIECES, does_not_pay


class Decomposition(NamedTuple):
    """``piece_tokens`` (0: do not cut), and why not (empty: cut). ``pieces`` in all; the rest counts tokens read in one verification of
    the batch.

    ``work_tokens`` as decided, merging included; ``padded_tokens`` uncut and padded; ``ragged_tokens`` without padding: no cut goes below.
    """

    piece_tokens: int
    pieces: int
    work_tokens: float
    padded_tokens: int
    ragged_tokens: int
    why_not: str


def best_piece(context: IntArray, pads: bool, merge_tokens: float, block_tokens: int = 1) -> Decomposition:
    """Return the length of piece for contexts int64[B] (tokens) that is least work; exact, by looking at every multiple of a block.

    ``pads``: whether the engine pads rows to the longest. ``merge_tokens`` >= 0: time of writing and merging one piece over that of reading
    one cached token, as measured. ``block_tokens``: pieces are whole KV blocks. Of equal work the longest piece is taken, and no cut before
    any. Raises ValueError for a value out of range.
    """
    if not merge_tokens >= 0:
        raise ValueError(f"merge_tokens must be >= 0, got {merge_tokens}")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be >= 1, got {block_tokens}")
    longest, ragged = int(context.max(initial=0)), int(context.sum())
    padded = len(context) * longest
    if not pads:
        return Decomposition(0, len(context), float(ragged), padded, ragged, CHAINS_ONLY[PIECES])
    length = np.arange(block_tokens, longest, block_tokens)[::-1]
    if not len(length):
        return Decomposition(0, len(context), float(padded), padded, ragged, NOT_LONGER)
    pieces = -(-context // length[:, None]).sum(1)
    work = (length + merge_tokens) * pieces
    best = int(work.argmin())
    if work[best] < padded:
        return Decomposition(int(length[best]), int(pieces[best]), float(work[best]), padded, ragged, "")
    return Decomposition(0, len(context), float(padded), padded, ragged, does_not_pay(padded / float(work[best])))
