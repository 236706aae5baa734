"""What a step's choice says of the next one: between two full searches it is where planning starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .goodput import NO_HINT, Choice, Hint
from .optimiser import FEW_ROWS
from .plan import NO_DRAFT, IntArray, View

_SEARCH_STEPS = 64  # between two full searches, which gain 0.04 % of the tokens and cost milliseconds
_ALIKE_ROWS = 8  # a batch that grew or shrank by no more than this part of it is like the last one


@dataclass(frozen=True, slots=True)
class Last:
    """What is kept of the last choice: the ``tokens`` proposed, the ``rows`` planned for, and the steps until the next full ``search``.

    ``chosen`` are the drafts and lengths by request of a few rows, ``caps`` the longest chains of many, as of the last search.
    """

    tokens: int = 0
    rows: int = 0
    search: int = 0
    caps: dict[int, int] | None = None
    chosen: dict[int, tuple[int, int]] | None = None

    def hint(self, view: View, rows: IntArray) -> Hint:
        """Return what it says of the choice for these rows of a view; no more than the tokens if a full search is due."""
        n = len(rows)
        if self.search and n > FEW_ROWS and abs(n - self.rows) * _ALIKE_ROWS <= n:
            return Hint(self.tokens, caps=self.caps)
        if self.search and n <= FEW_ROWS and self.chosen:
            requests = view.request[rows].tolist()
            if not self.chosen.keys().isdisjoint(requests):
                return Hint(self.tokens, Choice(*np.array([self.chosen.get(r, (NO_DRAFT, 0)) for r in requests]).T))
        return Hint(self.tokens) if self.tokens else NO_HINT

    def followed_by(self, view: View, rows: IntArray, choice: Choice, tokens: int, bound: float) -> Last:
        """Return what is kept of the choice for these rows. It was searched for if its ``bound`` is finite, or as nothing was known."""
        n, length, chosen = len(rows), choice.length, None
        if n <= FEW_ROWS:
            chosen = dict(zip(view.request[rows].tolist(), zip(choice.draft.tolist(), length.tolist(), strict=True), strict=True))
        if self.search and bound == math.inf:
            return Last(tokens, n, self.search - 1, self.caps, chosen)
        used = set(choice.draft.tolist()) - {NO_DRAFT} if n > FEW_ROWS else set()
        caps = {d: int(length[choice.draft == d].max()) for d in sorted(used)}
        return Last(tokens, n, _SEARCH_STEPS, caps, chosen)
