"""Exploration: now and then a step tries what the estimates do not prefer, out of a budget of time.

Most evidence is free: drafts without a model are scored in every step, and a draft that catches up
tells how it would have guessed what it reads. The rest is bought: every step saves a small share of
its time, and a trial takes place when it can be paid for. So every draft comes back, however poor
it seemed. A trial that promises to be worth more than it costs is charged a fifth of its cost:
wrong estimates of what knowing is worth can lead five times as far as the budget, and no farther.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .plan import FloatArray, IntArray
from .problem import Choice, Score, StepProblem, score, summed

TRIAL_TOKENS = 2
LEAST_COST = 0.12  # of a step's time: estimates flatter what looks free
_OWN_SHARE = 0.2  # of its cost that a trial is charged where knowing is worth more than that
_LOGISTIC_SCALE = math.sqrt(3) / math.pi  # of a deviation


class Hope(NamedTuple):
    """``hazard`` float64[K, D, n] so many ``deviations`` above the mean, and the share of the doubt
    [D, n] that a trial would settle.
    """

    hazard: FloatArray
    deviations: float
    settled: FloatArray


class Trial(NamedTuple):
    """A choice in which ``rows`` rows try something, its score, and the seconds that it costs; no
    rows: that is what the cheapest would cost.
    """

    choice: Choice
    result: Score
    rows: int
    cost_s: float


def trial(
    problem: StepProblem,
    hope: Hope,
    choice: Choice,
    result: Score,
    price: float,
    credit_s: float,
) -> Trial | None:
    """Return the choice with as many rows as ``credit_s`` affords trying the draft of which knowing
    more is worth most; None where even hope sees no gain.

    What it costs is what the objective loses by it at mean estimates, whole catch-up included;
    where what knowing is worth exceeds that, ``_OWN_SHARE`` of it is charged.
    """
    rows, draft, length, worth = _candidates(problem, hope, choice, price)
    cheapest, floor_s = None, LEAST_COST * result.step_s
    for count in sorted({len(rows), len(rows) // 2, len(rows) // 8, min(len(rows), 1)} - {0})[::-1]:
        tried = Choice(choice.draft.copy(), choice.length.copy())
        tried.draft[rows[:count]], tried.length[rows[:count]] = draft, length[rows[:count]]
        if tried.length.sum() > problem.last_total():
            continue
        found = score(problem, tried)
        lost_s = (result.value - found.value) / price + found.step_s - result.step_s
        if worth[rows[:count]].sum() > price * lost_s:
            cost_s = max(floor_s * count / problem.rows, _OWN_SHARE * lost_s)
        else:
            cost_s = max(floor_s, lost_s)
        if cost_s <= credit_s and found.step_s <= problem.limit_s:
            return Trial(tried, found, count, cost_s)
        cheapest = Trial(choice, result, 0, cost_s)
    return cheapest


def _candidates(
    problem: StepProblem, hope: Hope, choice: Choice, price: float
) -> tuple[IntArray, int, IntArray, FloatArray]:
    """Return the rows worth trying, the best first, with what draft, and by row the length and what
    knowing more is worth (tokens).

    Forwards and verification are paid for as if all rows took part. Where knowing pays for no
    draft, the single row of which most is hoped.
    """
    k_max, drafts, n = problem.gain.shape
    last, row = max(problem.last_total(), 1), np.arange(n)
    token_s = (problem.undrafted_s[last] - problem.undrafted_s[0]) / last
    token_s = token_s + problem.forward_s[:, n : n + 1] / n + problem.draft_row_s
    depth = np.arange(1, k_max + 1)[:, None, None]
    paid = np.where(depth <= problem.ceiling, price * depth * token_s, np.inf)
    survival = hope.hazard[:k_max].copy()
    for before, at in pairwise(survival):
        np.multiply(before, at, out=at)
    hoped, mean = summed(survival) - paid, problem.value - paid
    most, best = hoped.max(0), np.maximum(mean.max(0), -1e9)
    own = choice.draft == np.arange(drafts)[:, None]
    now = np.where(choice.length > 0, mean[choice.length - 1, choice.draft, row], 0.0)
    doubt = np.maximum(most - best, 0.0) / hope.deviations * np.sqrt(hope.settled)
    worth = np.where(own, 0.0, _expected_gain(best - now, doubt) * problem.horizon)
    loss, forward_s = np.maximum(now - best, 0.0), problem.forward_s[:, 1:2]
    length = np.where(own, choice.length, 0) + TRIAL_TOKENS
    length = np.minimum(length, np.where(own | (most <= hoped[0]), hoped.argmax(0) + 1, length))
    upside = np.where(length == own * choice.length, 0.0, most - price * problem.charge_s - now)
    upside = np.maximum(upside, 0.0)
    surplus = worth - price * problem.switch_s - loss
    surplus[(upside <= 0) | (worth <= 0)] = -np.inf
    gains = np.maximum(surplus, 0.0).sum(1) - price * forward_s[:, 0]
    if gains.max() > 0:
        d = int(gains.argmax())
        promise = surplus[d]
    else:
        d = int(upside.sum(1).argmax())
        promise = upside[d] / (price * (forward_s + problem.switch_s) + loss + 1e-9)[d]
    order = (-promise).argsort(kind="stable")
    order = order[promise[order] > 0]
    return order if gains.max() > 0 else order[:1], d, length[d], worth[d]


def _expected_gain(lead: FloatArray, deviation: FloatArray) -> FloatArray:
    """Return E[max(lead + deviation z, 0)] - max(lead, 0), z standard normal: how much knowing
    pays.

    The knowledge gradient (Frazier et al. 2008); the logistic distribution stands for the normal
    one: t log(1 + exp(-|lead| / t)).
    """
    scale = _LOGISTIC_SCALE * np.maximum(deviation, 1e-12)
    gain: FloatArray = scale * np.log1p(np.exp(-np.minimum(np.abs(lead) / scale, 700.0)))
    return gain
