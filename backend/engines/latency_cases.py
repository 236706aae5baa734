"""The passes by which an engine's time is measured: what a kind answers for ``latency_cases``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backend.sequence import BLOCK_TOKENS

BASE_CONTEXT = 64
LONG_CONTEXTS = (512, 1536)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15)
_BATCHES = {2: (0, 1, 3, 7), 4: (0, 1, 3, 7), 8: (0, 1, 3, 7), 16: (0, 1, 3), 32: (0, 1), 64: (0,)}
_CHUNKS = (128, 256)  # of prefill; without logits, so only sizes that verification seldom has
_CATCH_UPS = (2, 4, 8, 16, 64, 256)
_RUN = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of submission: ``rows`` sequences of ``context`` seen tokens, each followed by
    ``new`` committed tokens.

    A target's turn verifies a proposal of ``length`` tokens and runs one token freely (``run`` 0: a
    prefill chunk): (new + length) * rows query tokens in one pass. A draft's turn (``length`` 0)
    makes ``run`` passes, the first over the new tokens.
    """

    rows: int
    context: int
    new: int = 1
    length: int = 0
    run: int = 1

    @property
    def query_tokens(self) -> int:
        """Tokens of the first pass, summed over the rows."""
        return self.rows * (self.new + self.length)

    @property
    def blocks_per_row(self) -> int:
        """KV blocks that a row needs."""
        return -(-(self.context + self.new + self.length + self.run) // BLOCK_TOKENS)


def blocks_for(cases: Iterable[Case]) -> int:
    """Return how many KV blocks an engine needs for every one of the cases, one at a time."""
    return max(case.rows * case.blocks_per_row for case in cases)


def latency_cases(*, target: bool) -> list[Case]:
    """Return the cases of an engine that runs a model, as a target or as a draft."""
    return target_cases() if target else draft_cases()


def target_cases() -> list[Case]:
    """Return the cases of a target: verification of one row and of batches, prefill chunks, long
    contexts.
    """
    return [
        *(Case(1, BASE_CONTEXT, length=length) for length in _LENGTHS),
        *(
            Case(rows, BASE_CONTEXT, length=length)
            for rows, lengths in _BATCHES.items()
            for length in lengths
        ),
        *(Case(1, BASE_CONTEXT, new=chunk, run=0) for chunk in _CHUNKS),
        *(
            Case(rows, context, length=length)
            for context in LONG_CONTEXTS
            for rows, length in ((4, 0), (1, 3), (4, 1))  # one row alone leaves threads idle
        ),
    ]


def draft_cases() -> list[Case]:
    """Return the cases of a draft: chains of passes by rows, catch-up by tokens, long contexts."""
    return [
        *(Case(rows, BASE_CONTEXT, run=_RUN) for rows in (1, *_BATCHES)),
        *(Case(1, BASE_CONTEXT, new=new) for new in _CATCH_UPS),
        *(Case(rows, context, run=_RUN) for context in LONG_CONTEXTS for rows in (1, 4)),
    ]
