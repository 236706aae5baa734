"""Where it may pay to look: the probe whose knowledge is worth most beyond its price, and what it costs."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .goodput import Choice, Score, StepProblem, score, summed
from .plan import FloatArray, IntArray

PROBE_TOKENS = 2
PROBE_FLOOR = 0.12  # of a step's time: what a probe costs at least, since estimates flatter what looks free
_LOGISTIC_SCALE = math.sqrt(3) / math.pi  # of a deviation
_OWN_SHARE = 0.2


class Probe(NamedTuple):
    """A choice with ``rows`` rows probing, its score, and the seconds that it costs; 0 rows: nothing is affordable, at ``cost_s``."""

    choice: Choice
    result: Score
    rows: int
    cost_s: float


class Hope(NamedTuple):
    """Hazards [n, D, K] so many ``deviations`` above the mean, and the share of the doubt [n, D] that a probe would settle."""

    hazard: FloatArray
    deviations: float
    settled: FloatArray


class Trial(NamedTuple):
    """Rows worth trying, in order of promise, and for every row its draft and length in the trial and what knowing more is worth."""

    order: IntArray
    draft: IntArray
    length: IntArray
    worth: FloatArray


class Prospects(NamedTuple):
    """By draft and row, [D, n]: lengths to look with, what optimism gains in this step, what knowing is worth, and the mean's loss."""

    length: IntArray
    upside: FloatArray
    worth: FloatArray
    loss: FloatArray


def affordable(problem: StepProblem, trial: Trial, choice: Choice, result: Score, price: float, credit_s: float) -> Probe | None:
    """Return the choice with as many rows of the trial as ``credit_s`` affords; None if there is no room for any.

    A probe costs what the objective loses by it at mean estimates, whole catch-up included. Of one whose knowledge is worth more than that
    only a share is charged; the budget then bounds how far wrong estimates of the worth can lead.
    """
    order, draft, length, worth = trial
    cost_s, floor_s = 0.0, PROBE_FLOOR * result.step_s
    for count in sorted({len(order), max(1, len(order) // 2), max(1, len(order) // 8), 1}, reverse=True):
        if floor_s * count / problem.rows > credit_s and count > 1:
            continue
        chosen = order[:count]
        candidate = Choice(choice.draft.copy(), choice.length.copy())
        candidate.draft[chosen], candidate.length[chosen] = draft[chosen], length[chosen]
        if candidate.length.sum() > problem.last_total():
            continue
        outcome = score(problem, candidate)
        lost_s = (result.value - outcome.value) / price + outcome.step_s - result.step_s
        pays = float(worth[chosen].sum()) > price * lost_s
        cost_s = max(floor_s * count / problem.rows, _OWN_SHARE * lost_s) if pays else max(floor_s, lost_s)
        if cost_s <= credit_s and outcome.step_s <= problem.limit_s:
            return Probe(candidate, outcome, count, cost_s)
    return Probe(choice, result, 0, cost_s) if cost_s else None


def probe(problem: StepProblem, hope: Hope, choice: Choice, price: float) -> Trial | None:
    """Return the look at the one draft that most is hoped of, or None if even optimism sees no gain."""
    k_max, _, n = problem.gain.shape
    if k_max == 0 or n == 0:
        return None
    length, upside, worth, loss = worth_of_knowing(problem, hope, choice, price)
    cost = price * (problem.forward_s[:, 1:2] + problem.switch_s) + loss + 1e-9
    surplus = np.where((upside > 0) & (worth > 0), worth - price * problem.switch_s - loss, -np.inf)
    gains = np.maximum(surplus, 0.0).sum(1) - price * problem.forward_s[:, 1]
    if gains.max() > 0:
        draft = int(gains.argmax())
        order = np.argsort(-surplus[draft], kind="stable")
        order = order[surplus[draft, order] > 0]
        return Trial(order, np.full(n, draft), length[draft], worth[draft])
    draft = int(upside.sum(1).argmax())
    promise = upside[draft] / cost[draft]
    order = np.argsort(-promise, kind="stable")
    order = order[promise[order] > 0][:1]
    return Trial(order, np.full(n, draft), length[draft], worth[draft]) if len(order) else None


def worth_of_knowing(problem: StepProblem, hope: Hope, choice: Choice, price: float) -> Prospects:
    """Return what a look at each draft may bring each row; forwards are shared as if all rows took part."""
    k_max, drafts, n = problem.gain.shape
    last = max(problem.last_total(), 1)
    token_s = (problem.verify_s[min(last, len(problem.verify_s) - 1)] - problem.verify_s[0]) / last
    shared = price * ((token_s + problem.forward_s[:, n : n + 1] / n) + problem.row_s)  # [D, n]
    hoped, mean = hope.hazard[:, :, :k_max].transpose(2, 1, 0).copy(), problem.value
    for before, at in pairwise(hoped):
        np.multiply(before, at, out=at)
    hoped = summed(hoped)
    paid = np.arange(1.0, k_max + 1)[:, None, None] * shared
    if problem.ceiling.item(problem.ceiling.argmin()) < k_max:
        np.copyto(paid, np.inf, where=np.arange(k_max)[:, None, None] >= problem.ceiling)
    hoped -= paid
    mean = mean - paid
    own, most = choice.length.nonzero()[0], np.maximum.reduce(hoped)
    draft, own_length, present = choice.draft[own], np.zeros((drafts, n), np.int64), np.zeros(n)
    present[own] = mean[choice.length[own] - 1, draft, own]
    own_length[draft, own] = choice.length[own]
    length = np.where(hoped[0] < most, PROBE_TOKENS, 1)
    length[draft, own] = np.minimum(hoped[:, draft, own].argmax(0) + 1, choice.length[own] + PROBE_TOKENS)
    best = np.maximum(np.maximum.reduce(mean), -1e9)
    doubt = np.maximum(most - best, 0.0) / hope.deviations * np.sqrt(hope.settled.T)
    worth = np.where(own_length > 0, 0.0, _expected_gain(best - present, doubt) * problem.horizon)
    upside = np.where(length == own_length, 0.0, np.maximum(most - price * problem.charge_s - present, 0.0))
    return Prospects(length, upside, worth, np.maximum(present - best, 0.0))


def _expected_gain(lead: FloatArray, deviation: FloatArray) -> FloatArray:
    """Return E[max(lead + deviation z, 0)] - max(lead, 0) for standard normal z: how much knowing which is better pays.

    The knowledge gradient (Frazier et al. 2008), the logistic distribution standing for the normal one: t log(1 + exp(-|lead| / t)).
    """
    scale = _LOGISTIC_SCALE * np.maximum(deviation, 1e-12)
    gain: FloatArray = scale * np.log1p(np.exp(-np.minimum(np.abs(lead) / scale, 700.0)))
    return gain
