"""The joint choice of a draft and a length for every row of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .ascent import ascend
from .goodput import TIE, Choice, Score, StepProblem, no_speculation, score
from .one_row import OneRow
from .pairs import MOST_ROWS, best_of_all

_TRIMS = 4
_SCARCITIES = (1.0, 3.0, 9.0)


def best_choice(problem: StepProblem | OneRow, price: float) -> tuple[Choice, Score, float]:
    """Return the choice of the highest priced objective, its score, and a bound that no choice's objective exceeds.

    Of equal choices the one with the fewest proposed tokens; choices over ``problem.limit_s`` do not count. Exact up to three rows (the
    bound is the objective); beyond them never worse than no speculation.
    """
    if isinstance(problem, OneRow):
        return problem.best(price)
    if not problem.ceiling.any() or not problem.last_total():
        choice = no_speculation(problem.rows)
    elif problem.rows <= MOST_ROWS:
        choice = best_of_all(problem, price)
    else:
        choice, result, bound = ascend(problem, price)
        return (choice, result, bound) if result.step_s <= problem.limit_s else (*_within(problem, price), bound)
    result = score(problem, choice)
    return choice, result, result.objective(price)


def _within(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the best choice found within ``problem.limit_s``.

    Under such a limit the step's own seconds are scarce, catch-up whole: a few prices of them order the tokens. What the ascent takes a
    step to last may fall short, so that a choice that exceeds the limit after all is tried again with so much less.
    """
    whole = replace(problem, horizon=np.ones(problem.rows))
    choice = no_speculation(problem.rows)
    best = score(problem, choice)
    for scarcity in _SCARCITIES:
        aim_s = problem.limit_s
        for _ in range(_TRIMS):
            candidate, whole_score, _ = ascend(whole, price * scarcity, aim_s)
            over_s = whole_score.step_s - problem.limit_s
            if over_s <= 0:
                break
            aim_s -= over_s
        result = score(problem, candidate)
        if result.step_s <= problem.limit_s and result.objective(price) > best.objective(price) + TIE * (abs(best.value) + 1.0):
            choice, best = candidate, result
    return choice, best
