"""The joint choice of a draft and a length for every row of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .ascent import along, ascend, highest_objective, starts
from .goodput import TIE, Choice, Score, StepProblem, no_speculation, score
from .knapsack import by_totals
from .one_row import OneRow
from .pairs import MOST_ROWS, best_of_all, with_pair_changes, with_single_changes

FEW_ROWS = 8
_PROVEN = 0.002  # of the step's tokens: a choice this close to the bound is not worth improving
_MOST_STARTS, _MOST_PAIRS = 16, 20_000  # of a search: the starts, and the choices of pairs looked at in a pass over all of them
_TRIMS = 4
_SCARCITIES = (1.0, 3.0, 9.0)


def best_choice(problem: StepProblem | OneRow, price: float) -> tuple[Choice, Score, float]:
    """Return the choice of the highest priced objective, its score, and a bound that no choice's objective exceeds.

    Of equal choices the one with the fewest proposed tokens; choices over ``problem.limit_s`` do not count. Exact up to two rows (the
    bound is the objective), and up to three if nothing is known of the answer. Up to ``FEW_ROWS`` a knapsack of totals, improved row by
    row; if nothing is known, a search that takes ten times as long. Beyond, or under a cap, an ascent. None of them is ever worse than no
    speculation. The bound is infinite for a knapsack, and where the ascent starts from the hint.
    """
    if isinstance(problem, OneRow):
        return problem.best(price)
    rows, known = problem.rows, problem.hint.caps is not None
    few = rows <= FEW_ROWS and problem.cap_s == math.inf
    if not np.count_nonzero(problem.ceiling) or not problem.last_total():
        choice = no_speculation(rows)
    elif rows < MOST_ROWS or (rows == MOST_ROWS and not (few and known)):
        choice = best_of_all(problem, price)
    elif few and known:
        quick = with_single_changes(problem, price, by_totals(problem, price))
        return (*_better(problem, price, _nothing(problem), quick), math.inf)
    elif begun := along(problem, price):
        return (*begun, math.inf)
    else:
        choice, result, bound = ascend(problem, price)
        if result.step_s > problem.limit_s:
            return (*_within(problem, price), bound)
        if few and bound - result.objective(price) > _PROVEN * result.value:
            choice, result = _searched(problem, price, choice, result)
        return choice, result, bound
    result = score(problem, choice)
    return choice, result, result.objective(price)


def within_reach(problem: StepProblem, goodput: float, prefill_s: float = 0.0) -> bool:
    """Return False where no choice at all that speculates can have a goodput, in tokens per charged second but ``prefill_s``; else True.

    A choice has it if its objective at that price of time, with those seconds given back, is not negative: so does none where a bound on
    the objective is.
    """
    if not np.count_nonzero(problem.ceiling) or not problem.last_total():
        return False
    return highest_objective(problem, goodput) + goodput * prefill_s >= 0


def _nothing(problem: StepProblem) -> tuple[Choice, Score]:
    choice = no_speculation(problem.rows)
    return choice, score(problem, choice)


def _better(problem: StepProblem, price: float, best: tuple[Choice, Score], candidate: Choice) -> tuple[Choice, Score]:
    """Return the candidate with its score if it is better than the best so far."""
    result = score(problem, candidate)
    return (candidate, result) if result.objective(price) > best[1].objective(price) + TIE * (best[1].value + 1.0) else best


def _searched(problem: StepProblem, price: float, choice: Choice, result: Score) -> tuple[Choice, Score]:
    """Return the best of a choice and the most promising starts, each improved by changes of two rows as far as time allows."""
    k_max, drafts, rows = problem.gain.shape
    width = rows * (rows - 1) // 2 * (1 + drafts * k_max) ** 2
    change, most = (with_pair_changes, min(_MOST_STARTS, _MOST_PAIRS // width)) if width <= _MOST_PAIRS else (with_single_changes, 2)
    scored = [(score(problem, start).objective(price), start) for start in starts(problem, price)]
    promising = sorted(scored, key=lambda pair: -pair[0])[:most]
    best = choice, result
    for start in (choice, by_totals(problem, price), *(start for _, start in promising)):
        best = _better(problem, price, best, change(problem, price, start))
    return best


def _within(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the best choice found within ``problem.limit_s``.

    Under such a limit the step's own seconds are scarce, catch-up whole: a few prices of them order the tokens. What the ascent takes a
    step to last may fall short, so that a choice that exceeds the limit after all is tried again with so much less.
    """
    whole = replace(problem, horizon=np.ones(problem.rows))
    choice, best = _nothing(problem)
    for scarcity in _SCARCITIES:
        aim_s = problem.limit_s
        for _ in range(_TRIMS):
            candidate, whole_score, _ = ascend(whole, price * scarcity, aim_s)
            over_s = whole_score.step_s - problem.limit_s
            if over_s <= 0:
                break
            aim_s -= over_s
        if score(problem, candidate).step_s <= problem.limit_s:
            choice, best = _better(problem, price, (choice, best), candidate)
    return choice, best
