"""The search for a step's choice, and its price of time, over a ``StepProblem``
(``policy.loops.search``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .loops import search as loops
from .loops.problem import StepProblem
from .problem import Choice, Score, contiguous


class Priced(NamedTuple):
    """A choice with its score, and what it was made at, both in tokens per second."""

    choice: Choice
    result: Score
    price: float
    """Price of time."""
    goodput: float
    """Goodput of the batch without prefill."""


def best(
    problem: StepProblem, *, known: float = 0.0, waiting: float = 1.0, prefill_s: float = 0.0
) -> Priced:
    """Return the best choice at the price of time (``policy.loops.search.best_priced``)."""
    draft, length = np.empty((2, problem.rows), np.int64)
    found = loops.best_priced(contiguous(problem), known, waiting, prefill_s, draft, length)
    price, goodput, *result = found
    return Priced(Choice(draft, length), Score(*result), price, goodput)


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective that is found, and its score.

    It is never worse than no speculation, and within ``problem.limit_s``. Among equal choices it is
    the one with the fewest proposed tokens.
    """
    draft, length = np.empty((2, problem.rows), np.int64)
    result = loops.best_at_price(contiguous(problem), price, draft, length)
    return Choice(draft, length), Score(*result)
