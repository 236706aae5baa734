"""The loops of ``policy.loops`` about one step, for arrays of any kind: for tests, benches and the
page about the policy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policy.loops import search
from policy.loops.problem import Limits, StepProblem, build
from policy.loops.times import FIRST_DRAFT, Times, predict
from policy.plan import FloatArray, Outcome, View
from policy.planner import AdaptivePlanner
from policy.problem import Choice, Score, batch_of, contiguous


class PricedChoice(NamedTuple):
    """A choice with its score, and what it was made at, both in tokens per second."""

    choice: Choice
    result: Score
    price: float
    """Price of time."""
    goodput: float
    """Goodput of the batch without prefill."""


def step_problem(
    times: Times,
    view: View,
    hazard: FloatArray,
    k_max: int,
    horizon_steps: float,
    nodes: FloatArray | None = None,
) -> StepProblem:
    """Return the choice that the rows of a view have, those of a control apart; ``hazard``
    float64[K, drafts, rows], ``nodes`` as ``policy.loops.problem.build`` says.
    """
    rows = np.arange(len(view))
    problem, _, _ = build(
        times,
        batch_of(view, rows, rows),
        Limits(k_max, float(horizon_steps), 0, 0),
        np.ascontiguousarray(hazard, np.float64),
        np.ones(hazard.shape) if nodes is None else nodes,
    )
    return problem


def best(
    problem: StepProblem, *, tokens: float = 0.0, waiting: float = 1.0, prefill_s: float = 0.0
) -> PricedChoice:
    """Return the best choice at the price of time (``policy.loops.search.best_priced``)."""
    draft, length = np.empty((2, problem.rows), np.int64)
    priced = search.best_priced(contiguous(problem), tokens, waiting, prefill_s, draft, length)
    price, goodput, *result = priced
    return PricedChoice(Choice(draft, length), Score(*result), price, goodput)


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective that is found, and its score.

    It is never worse than no speculation, and within ``problem.limit_s``. Among equal choices it is
    the one with the fewest proposed tokens.
    """
    draft, length = np.empty((2, problem.rows), np.int64)
    result = search.best_at_price(contiguous(problem), price, draft, length)
    return Choice(draft, length), Score(*result)


def predict_parts(
    planner: AdaptivePlanner, times: Times, outcome: Outcome, view: View
) -> FloatArray:
    """Return the seconds that a step should have taken as it was executed, by part."""
    parts = np.empty(FIRST_DRAFT + len(planner.drafts))
    predict(times, planner.step_of(outcome, view), parts)
    return parts
