"""Trials: now and then a step tries what the estimates do not prefer, out of a budget of time."""

import math

import numpy as np

from .acceptance import CONSTANTS, ESTIMATES, Constants, Estimates, set_doubt
from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper
from .problem import STEP_PROBLEM, StepProblem, charge_s, limit_s, score
from .search import descending

TRIAL_TOKENS = 2
LEAST_COST = 0.12
"""The least that a trial costs, in steps: estimates flatter what looks free."""
_LOGISTIC_SCALE = math.sqrt(3) / math.pi  # of a deviation


@helper
def _expected_gain(lead: float, deviation: float) -> float:
    """Return E[max(lead + deviation z, 0)] - max(lead, 0), z standard normal: what knowing pays.

    The knowledge gradient (Frazier et al. 2008); the logistic distribution stands for the normal
    one: t log(1 + exp(-|lead| / t)).
    """
    scale = _LOGISTIC_SCALE * max(deviation, 1e-12)
    return scale * math.log1p(math.exp(-min(abs(lead) / scale, 700.0)))


@helper
def _weigh(
    problem: StepProblem,
    estimates: Estimates,
    constants: Constants,
    slot: Ints,  # [n]
    evidence: Ints,  # [n, D]
    hazard: Floats,  # [K, D, n] not cut to the ceilings
    unread: Ints,  # [D, n]
    optimism: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
    price: float,
    tried: Ints,  # [D, n]
    surplus: Floats,  # [D, n]
    upside: Floats,  # [D, n]
    promise: Floats,  # [D, n]
) -> None:
    """Weigh every draft as a trial of each row: ``tried`` tokens, ``surplus`` what knowing
    more is worth less what it costs (tokens, at least 0), ``upside`` what is hoped for, ``promise``
    the same by what it costs.

    Forwards and verification are paid for as if all rows took part. Hope is ``optimism`` standard
    deviations above the mean. A draft that catches up reads ``unread`` tokens emitted without it,
    and knows of each whether it would have guessed it.
    """
    p = problem
    k_max, drafts, n = p.gain.shape
    last = max(len(p.undrafted_s) - 1, 1)
    verify_s = (p.undrafted_s[last] - p.undrafted_s[0]) / last
    spread = np.empty(k_max)
    for i in range(n):
        now, k0, d0 = 0.0, length[i], draft[i]
        if k0:
            token_s = verify_s * p.nodes[0, d0, i] + p.forward_s[d0, n] / n
            token_s += p.draft_row_s[0, d0, i]
            now = p.gain[:k0, d0, i].sum() - price * k0 * token_s
        for d in range(drafts):
            is_present, most = d == d0 and k0 > 0, p.ceiling[d, i]
            tried[d, i], surplus[d, i] = 0, 0.0
            worth = upside[d, i] = promise[d, i] = 0.0
            if most == 0:
                continue
            variance = set_doubt(
                estimates, constants, slot[i], d, evidence[i, d], hazard[:k_max, d, i], spread
            )
            token_s = verify_s * p.nodes[0, d, i] + p.forward_s[d, n] / n + p.draft_row_s[0, d, i]
            hoped = mean = 0.0
            survival, first, high, high_at, best = 1.0, 0.0, -np.inf, 0, -1e9
            for j in range(most):
                survival *= min(hazard[j, d, i] + optimism * spread[j], 1.0)
                hoped += survival - price * token_s
                mean += p.gain[j, d, i] - price * token_s
                best = max(best, mean)
                if j == 0:
                    first = hoped
                if hoped > high:
                    high, high_at = hoped, j + 1
            tried[d, i] = (k0 if is_present else 0) + TRIAL_TOKENS
            if is_present or high <= first:
                tried[d, i] = min(tried[d, i], high_at)
            tried[d, i] = min(tried[d, i], most)
            expected = variance * (TRIAL_TOKENS + unread[d, i]) * hazard[0, d, i]
            expected *= 1 - hazard[0, d, i]
            doubt = max(high - best, 0.0) / optimism * math.sqrt(expected / (1 + expected))
            if not is_present:
                worth = _expected_gain(best - now, doubt) * p.horizon[i]
            if tried[d, i] != (k0 if is_present else 0):
                upside[d, i] = max(high - price * charge_s(p, d, i) - now, 0.0)
            loss = max(now - best, 0.0)
            if upside[d, i] > 0 and worth > 0:
                surplus[d, i] = max(worth - price * p.switch_s[d, i] - loss, 0.0)
            cost = price * (p.forward_s[d, 1] + p.switch_s[d, i]) + loss
            promise[d, i] = upside[d, i] / (cost + 1e-9)


@helper
def _candidates(
    problem: StepProblem,
    price: float,
    surplus: Floats,  # [D, n]
    upside: Floats,  # [D, n]
    promise: Floats,  # [D, n]
    order: Ints,  # [n]
) -> tuple[int, int, bool]:
    """Find the draft that is most worth knowing more about. Return it, how many rows are worth
    trying, into ``order``, the best first, and whether knowing pays.

    If it pays for no draft, it is the single row that hopes for most.
    """
    drafts, n = surplus.shape
    best, best_d = 0.0, -1
    for d in range(drafts):
        gained = -price * problem.forward_s[d, 1]
        for i in range(n):
            gained += surplus[d, i]
        if gained > best:
            best, best_d = gained, d
    pays = best_d >= 0
    if not pays:
        for d in range(drafts):
            if best_d < 0 or upside[d].sum() > upside[best_d].sum():
                best_d = d
    by = surplus[best_d] if pays else promise[best_d]
    value, place, count = np.empty(n), np.empty(n, np.int64), 0
    for i in range(n):
        if by[i] > 0:
            value[count], place[count] = by[i], i
            count += 1
    by_value = np.empty(count, np.int64)
    descending(value[:count], by_value)
    for at in range(count):
        order[at] = place[by_value[at]]
    return best_d, count if pays else min(count, 1), pays


@entry(
    *(STEP_PROBLEM, ESTIMATES, CONSTANTS, INTS[1], INTS[2], FLOATS[3], INTS[2]),
    *(*[FLOATS[0]] * 5, INTS[1], INTS[1]),
)
def find_trial(
    problem: StepProblem,
    estimates: Estimates,
    constants: Constants,
    slot: Ints,  # [n]
    evidence: Ints,  # [n, D]
    hazard: Floats,  # [K, D, n]
    unread: Ints,  # [D, n]
    optimism: float,
    price: float,
    credit_s: float,
    value: float,
    step_s: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> tuple[int, float, float, float, bool]:
    """Let as many rows as ``credit_s`` affords try the draft that is most worth knowing more about,
    in place. Return how many, the seconds that it costs, the choice's value and step seconds, and
    whether it pays. 0 rows: what the cheapest would cost, 0 seconds: even hope sees no gain.

    It costs what the objective loses by it at mean estimates, whole catch-up included.
    """
    p = problem
    k_max, drafts, n = p.gain.shape
    tried, order = np.empty((drafts, n), np.int64), np.empty(n, np.int64)
    surplus, upside, promise = np.empty((3, drafts, n))
    _weigh(
        p, estimates, constants, slot, evidence, hazard, unread, optimism, draft, length, price,
        tried, surplus, upside, promise,
    )  # fmt: skip
    d, rows, pays = _candidates(p, price, surplus, upside, promise, order)
    most_s, floor_s, cheapest_s = limit_s(p), LEAST_COST * step_s, 0.0
    new_draft, new_length = np.empty(n, np.int64), np.empty(n, np.int64)
    forwards = np.empty((drafts, k_max), np.int64)
    before = 0
    for part in (1, 2, 8, n):
        count = max(rows // part, 1) if part == n else rows // part
        if count in (0, before) or rows == 0:
            continue
        before = count
        new_draft[:] = draft
        new_length[:] = length
        for place in range(count):
            i = order[place]
            new_draft[i], new_length[i] = d, tried[d, i]
        v, _, s = score(p, new_draft, new_length, forwards)
        cost_s = max(floor_s, (value - v) / price + s - step_s)
        if cost_s <= credit_s and s <= most_s:
            draft[:] = new_draft
            length[:] = new_length
            return count, cost_s, v, s, pays
        cheapest_s = cost_s
    return 0, cheapest_s, value, step_s, pays
