"""The price of time: a step's choice and the goodput that prices it, found together."""

from __future__ import annotations

import math
from typing import NamedTuple

from .goodput import Choice, Score, StepProblem, no_speculation
from .one_row import OneRow
from .optimiser import best_choice, within_reach
from .plan import View

_COLD_TOLERANCE, _WARM_TOLERANCE = 0.01, 0.03  # of the price, whose error costs in second order; the next step goes on
_PRICE_ROUNDS = 4

Problem = StepProblem | OneRow


class Priced(NamedTuple):
    """A choice with its score, the ``price`` of time it was made at and the batch's ``goodput`` without prefill, in tokens per second.

    No choice's priced objective exceeds ``bound``.
    """

    choice: Choice
    result: Score
    price: float
    goodput: float
    bound: float


def promised_gain(share: float, margin: float, held: float) -> float:
    """Return what speculation must promise, as a multiple of plain decoding's goodput, to be chosen for this ``share`` of the rows.

    It is ``margin`` more; and it is not to lose if no more than ``held`` of its goodput comes true, as so far.
    """
    return max(1 + share * margin, 1 / held)


def priced_choice(problem: Problem, prefill_s: float, view: View, known: float, margin: float, held: float = 1.0) -> Priced:
    """Return the best choice at the price of time, from the ``known`` goodput of the last step (0: none).

    Dinkelbach's iteration (1967) finds the goodput that prices itself. A second of the step delays all that are admitted by one, and is
    worth what they would emit in it: those still in prefill, and those in other cohorts, count like the rows that decode. ``prefill_s``
    is how much longer the step takes for its prefill. Speculation that promises less than ``promised_gain`` is not chosen; nothing is
    searched for where a bound says that no choice can.
    """
    rows, plain_s = problem.rows, problem.plain_s - prefill_s
    nothing = Score(problem.base_value, problem.plain_s, problem.plain_s)
    if rows == 0:
        goodput = problem.base_value / plain_s if problem.base_value else known
        return Priced(no_speculation(0), nothing, 0.0, goodput, problem.base_value)
    tolerance = _WARM_TOLERANCE if known else _COLD_TOLERANCE
    plain = problem.base_value / plain_s
    waiting = 1 + (view.prefilling + len(view) - view.decoding) / view.decoding
    enough = promised_gain(view.share, margin, held) * plain
    if isinstance(problem, StepProblem) and not within_reach(problem, enough, prefill_s):
        return Priced(no_speculation(rows), nothing, waiting * plain, plain, math.inf)
    goodput = known or plain
    for _ in range(_PRICE_ROUNDS):
        price = waiting * goodput
        choice, result, bound = best_choice(problem, price)
        previous, goodput = goodput, result.value / (result.charged_s - prefill_s)
        if abs(goodput - previous) <= tolerance * previous:
            break
    if result.value > problem.base_value and goodput < enough:
        choice, result, goodput = no_speculation(rows), nothing, plain
    return Priced(choice, result, price, goodput, bound)
