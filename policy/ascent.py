"""The choice for more rows than can be enumerated: coordinate ascent over the longest chain of every draft, and a bound on the best.

A draft's forward is taken to cost a line's worth, so much to open its depth and so much a token. Then, with a price theta of a verified
token and the longest chains K_d fixed, every row chooses alone; and what is left, how many tokens to verify in all, is one scan of the real
staircase. theta is the slope of that staircase where the scan ends.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, Score, StepProblem, no_speculation, score, summed
from .plan import NO_DRAFT, BoolArray, FloatArray, IntArray

_SLOPES = 3  # values of theta tried at most
_CLOSE = 0.005  # of the step's tokens: a total this close to the best at theta is not worth another theta
_FEW_ROWS = 8  # up to so many, nothing is close enough when nothing likely is known
_NOTHING = 1e-300


class Terms(NamedTuple):
    """A problem under a price, in tokens, every draft's forward by its line.

    ``net[K, D, n]`` is what a position brings beside its verification and the opening of its depth, ``charge[D, n]`` what joining a draft
    costs a row once, ``opening[K, D]`` what a depth costs all together and ``chains[K, D]`` all up to it, ``verify[m]`` the verification of
    m tokens.
    """

    net: FloatArray
    charge: FloatArray
    opening: FloatArray
    chains: FloatArray
    verify: FloatArray

    @classmethod
    def of(cls, problem: StepProblem, price: float) -> Terms:
        """Return the terms. No forward takes less than its line says: then what is best of the lines bounds what is best."""
        token_s, opening_s = problem.lines()
        token_s, opening = token_s[:, None], price * opening_s
        return cls(
            problem.gain - price * (token_s + problem.row_s),
            price * (problem.charge_s + (problem.first_tokens - 1) * token_s),
            opening,
            summed(opening),
            price * problem.verify_s[: problem.last_total() + 1],
        )


def ascend(problem: StepProblem, price: float, limit_s: float = math.inf) -> tuple[Choice, Score, float]:
    """Return a choice, its score, and a bound that no choice's objective exceeds. The choice is never worse than no speculation.

    Totals whose step seems to take longer than ``limit_s`` are left out.
    """
    terms = Terms.of(problem, price)
    choice, result = no_speculation(problem.rows), Score(problem.base_value, problem.plain_s, problem.plain_s)
    plain, bound, totals = result.objective(price), math.inf, np.arange(len(terms.verify))
    theta = _slope_around(terms.verify, problem.hint.tokens)
    close = TIE if problem.rows <= _FEW_ROWS else _CLOSE * problem.base_value
    for _ in range(_SLOPES):
        wanted = np.maximum(terms.net - theta, 0.0)
        tilted = theta * totals - terms.verify
        highest = float(tilted[tilted.argmax()])
        bound = min(bound, max(plain, problem.base_value + _bound(terms, wanted) + highest - price * problem.speculation_s))
        draft, caps = _longest_chains(_worth(wanted, terms.charge), terms.chains)
        candidate = _as_wanted(wanted, draft, caps)
        short = _shortfall(tilted, highest, candidate)
        if short > close or problem.limit is not None or limit_s < math.inf:
            candidate = _on_staircase(problem, price, terms, draft, caps, limit_s)
            short = _shortfall(tilted, highest, candidate)
        candidate_score = score(problem, candidate)
        if candidate_score.objective(price) > result.objective(price) + TIE * (result.value + 1):
            choice, result = candidate, candidate_score
        if short <= close:
            break
        theta = _slope_at(terms.verify, int(candidate.length.sum()), theta)
    return choice, result, bound


def highest_objective(problem: StepProblem, price: float) -> float:
    """Return a bound that the objective of no choice that speculates exceeds, at the theta of verification's cheapest tokens."""
    terms = Terms.of(problem, price)
    theta = float(((terms.verify[1:] - terms.verify[0]) / np.arange(1, len(terms.verify))).min())
    wanted = np.maximum(terms.net - theta, 0.0)
    return problem.base_value + _bound(terms, wanted) - float(terms.verify[0]) - price * problem.speculation_s


def along(problem: StepProblem, price: float) -> tuple[Choice, Score] | None:
    """Return what an ascent from the hint's longest chains finds at once, at the slope around its tokens; None where that is no better than
    no speculation, or is not to be had so.
    """
    hint = problem.hint
    if not hint.caps or hint.tokens == 0 or problem.limit is not None or problem.cap_s < math.inf:
        return None
    terms = Terms.of(problem, price)
    theta = _slope_around(terms.verify, hint.tokens)
    wanted = terms.net - theta
    np.maximum(wanted, 0.0, out=wanted)
    caps = {d: min(cap, len(problem.gain)) for d, cap in hint.caps.items()}
    draft, caps = _longest_chains(_worth(wanted, terms.charge), terms.chains, caps)
    choice = _as_wanted(wanted, draft, caps)
    tilted = theta * np.arange(len(terms.verify)) - terms.verify
    if _shortfall(tilted, float(tilted[tilted.argmax()]), choice) > _CLOSE * problem.base_value:
        choice = _on_staircase(problem, price, terms, draft, caps, math.inf)
    result = score(problem, choice)
    return (choice, result) if result.objective(price) > problem.base_value - price * problem.plain_s else None


def _shortfall(tilted: FloatArray, highest: float, choice: Choice) -> float:
    """Return what a choice's total loses against the best total at theta."""
    total = int(np.add.reduce(choice.length))
    return highest - float(tilted[total]) if total < len(tilted) else math.inf


def starts(problem: StepProblem, price: float) -> list[Choice]:
    """Return choices to start from that open what the ascent may not have: all that one draft gives up to one depth, or all give at all.

    A depth's opening is left out, and verification is taken to be free or to cost its mean slope.
    """
    terms, (k_max, drafts, rows) = Terms.of(problem, price), problem.gain.shape
    found, row = [], np.arange(rows)
    depths = range(k_max) if k_max <= 4 else (0, 1, 3, k_max - 1)
    for theta in (0.0, _slope_around(terms.verify, 0)):
        wanted = np.maximum(terms.net - theta, 0.0)
        wishes = (wanted > 0).sum(0)
        worth = np.cumsum(wanted, axis=0) - terms.charge
        best = worth[-1].argmax(0)
        plans = [(best, wishes[best, row], worth[-1, best, row])]
        plans += [(np.full(rows, d), np.minimum(wishes[d], k + 1), worth[k, d]) for d in range(drafts) for k in depths]
        for draft, wished, value in plans:
            length = np.where((value > 0) & _within_limits(problem, draft, value), wished, 0)
            order = np.argsort(-value, kind="stable")
            length[order[np.cumsum(length[order]) >= len(terms.verify)]] = 0  # no room
            found.append(Choice(np.where(length > 0, draft, NO_DRAFT), length))
    return [choice for choice in found if choice.length.any()]


def _within_limits(problem: StepProblem, draft: IntArray, value: FloatArray) -> BoolArray:
    """Return which rows a draft takes if it takes those of the highest value as far as its limit goes."""
    taken = np.ones(len(draft), np.bool_)
    for d, most in enumerate([] if problem.limit is None else problem.limit.tolist()):
        group = (draft == d).nonzero()[0]
        if len(group) > most:
            taken[group[np.argsort(-value[group], kind="stable")[most:]]] = False
    return taken


def _slope_around(verify: FloatArray, total: int) -> float:
    """Return the mean slope of the verification from a quarter below a total to a quarter above; of all but the first token for 0."""
    last = len(verify) - 1
    low, high = (min(total - total // 4, last - 1), min(total + total // 4 + 1, last)) if total else (min(1, last - 1), last)
    return float(verify[high] - verify[low]) / (high - low)


def _slope_at(verify: FloatArray, total: int, theta: float) -> float:
    """Return the slope nearest to theta of a line that touches the verification at a total and lies below it, as far as there is one."""
    rise, run = verify - verify[total], np.arange(len(verify)) - total
    if total + 1 < len(verify):
        theta = min(theta, float((rise[total + 1 :] / run[total + 1 :]).min()))
    return max(theta, float((rise[:total] / run[:total]).max())) if total else theta


def _worth(wanted: FloatArray, charge: FloatArray) -> FloatArray:
    """Return what a row has of a draft whose longest chain is k + 1, float64[K, D, n]."""
    worth = summed(wanted)
    worth -= charge
    return np.maximum(worth, 0.0, out=worth)


def _bound(terms: Terms, wanted: FloatArray) -> float:
    """Return what all rows together are worth at most, the opening of a depth being shared out by what the rows want of it.

    Any shares that add up to the opening's price give a bound (each row alone can then only gain by paying less), as in facility location
    (Erlenkotter, 1978). The limits are left out, which makes it no smaller.
    """
    kept = np.maximum(1 - terms.opening / np.maximum(over_rows(wanted), _NOTHING), 0.0)
    alone = np.einsum("kdn,kd->dn", wanted, kept) - terms.charge
    return float(np.maximum(alone.max(0), 0.0).sum())


def over_rows(values: FloatArray) -> FloatArray:
    """Return the sums over rows, [K, D]."""
    k_max, drafts, rows = values.shape
    total: FloatArray = values.reshape(-1, rows).dot(_ones(rows)).reshape(k_max, drafts)
    return total


@lru_cache(maxsize=512)
def _ones(count: int) -> FloatArray:
    return np.ones(count)


def _longest_chains(worth: FloatArray, chains: FloatArray, start: dict[int, int] | None = None) -> tuple[IntArray, dict[int, int]]:
    """Return each row's draft (NO_DRAFT: it would rather not) and the longest chain of every draft in use.

    One draft after the other joins, or lengthens its chains, as gains most beside those in use.
    """
    _, drafts, rows = worth.shape
    caps: dict[int, int] = {}
    draft, best, costs = np.full(rows, NO_DRAFT), np.zeros(rows), chains.copy()

    def use(d: int, cap: int) -> None:
        caps[d] = cap
        costs[:, d] -= costs[cap - 1, d]  # for a longer one than this, the difference is to be paid
        costs[:cap, d] = math.inf
        np.copyto(draft, d, where=worth[cap - 1, d] > best)
        np.maximum(best, worth[cap - 1, d], out=best)

    for d, cap in (start or {}).items():
        use(d, cap)
    for _ in range(2 * drafts):
        total = over_rows(np.maximum(worth, best) if caps else worth)
        total -= costs
        highest = total.item(total.argmax())
        if not highest > float(np.add.reduce(best)) + TIE:
            break
        k, d = divmod(int((total >= highest - TIE).argmax()), drafts)  # of equal ones the shortest: rounding must not choose
        use(d, k + 1)
    return draft, caps


def _as_wanted(wanted: FloatArray, draft: IntArray, caps: dict[int, int]) -> Choice:
    """Return the choice of every row's own wish at theta, as far as the longest chain of its draft allows."""
    if not caps:
        return no_speculation(len(draft))
    k_max, drafts, rows = wanted.shape
    longest = np.array([caps.get(d, 0) for d in range(drafts)] + [0])  # the last for NO_DRAFT
    wishes = _ones(k_max).dot(wanted.reshape(k_max, -1).take(draft * rows + np.arange(rows), 1) > 0)
    length = np.minimum(wishes.astype(np.int64), longest[draft])
    return Choice(np.where(length > 0, draft, NO_DRAFT), length)


def _on_staircase(problem: StepProblem, price: float, terms: Terms, draft: IntArray, caps: dict[int, int], limit_s: float) -> Choice:
    """Return the best of every total, tokens being added one by one in the order of what they bring, and scored on the real staircase.

    A charge is deducted from a row's tokens in proportion, so that its chain stays in order; a depth's opening from the first token there.
    """
    rows = problem.rows
    if not caps:
        return no_speculation(rows)
    longest, row = max(caps.values()), np.arange(rows)
    if len(caps) == 1:
        draft = np.full(rows, next(iter(caps)))
    else:
        used = np.array(list(caps))
        draft = np.where(draft == NO_DRAFT, used[(terms.net.sum(0) - terms.charge)[used].argmax(0)], draft)
    net = np.maximum(terms.net[:longest, draft, row], 0.0)
    if len(caps) > 1:
        net[np.arange(longest)[:, None] >= np.array([caps.get(d, 0) for d in range(len(terms.charge))])[draft]] = 0.0
    charge = terms.charge[draft, row]
    net *= np.maximum(1 - charge / np.maximum(net.sum(0), _NOTHING), 0.0)
    if problem.limit is not None:
        net *= _within_limits(problem, draft, net.sum(0))
    value = net.copy()
    for d, cap in caps.items():
        group = (draft == d).nonzero()[0]
        if len(group):
            value[np.arange(cap), group[net[:cap, group].argmax(1)]] -= terms.opening[:cap, d]
    count = min(int(np.count_nonzero(net)), len(terms.verify) - 1)
    place = np.argsort(-net, axis=None, kind="stable")[:count]
    if not count:
        return no_speculation(rows)
    objective = np.cumsum(value.ravel()[place]) - terms.verify[1 : count + 1]
    if limit_s < math.inf:
        cost = (problem.gain[:longest, draft, row] - value).ravel()[place]
        seconds = problem.verify_s[1 : count + 1] + problem.speculation_s + np.cumsum(cost) / price
        objective[seconds > limit_s] = -np.inf
    last = int(objective.argmax())
    if objective[last] == -np.inf:
        return no_speculation(rows)
    length = np.bincount(place[: last + 1] % rows, minlength=rows)
    return Choice(np.where(length > 0, draft, NO_DRAFT), length)
