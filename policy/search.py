"""One search for a step's choice, and the one price of time that it is made at.

Drafts open one by one, as long as what the rows have of one more pays for its forwards, which are
taken to cost a line's worth here: the greedy rule of facility location (Cornuejols, Fisher and
Nemhauser, 1977). Then tokens join in the order of what they bring, and the best depth and total win
by the real staircases of drafting and verification. In small batches the choice is polished by
changes of one row at a time, which is exact for a single row.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, Score, StepProblem, no_speculation, score, summed
from .plan import NO_DRAFT, FloatArray, IntArray

_POLISHED_ROWS = 16  # beyond that a single row can gain little for the whole batch
_PRICE_ROUNDS = 3
_TOLERANCE = 0.03  # of the price, whose error costs in second order; the next step goes on
_SLOPES = 2  # of verification tried at most, the first of them none
_SCARCITIES = (1.0, 3.0, 9.0)  # prices tried under a cap, as multiples: seconds are scarcer there
_NOTHING = 1e-300
_CLOSE = 0.05  # tokens for a token more: prices of verification this near choose alike


class Priced(NamedTuple):
    """A choice with its score, the ``price`` of time that it was made at and the batch's
    ``goodput`` without prefill, both in tokens per second.
    """

    choice: Choice
    result: Score
    price: float
    goodput: float


def best(
    problem: StepProblem,
    *,
    known: float = 0.0,
    waiting: float = 1.0,
    prefill_s: float = 0.0,
    least_gain: float = 1.0,
) -> Priced:
    """Return the best choice at the price of time, from the ``known`` goodput (0: none) on.

    Dinkelbach's iteration (1967) finds the goodput that prices itself. A second of the step delays
    all that are admitted by one, and is worth what they would emit in it: the price is ``waiting``
    times the goodput, which is how many there are for each row that decodes. ``prefill_s`` is how
    much longer the step takes for its prefill. Speculation of less than ``least_gain`` times plain
    decoding's goodput is not chosen.
    """
    plain_s = problem.plain_s - prefill_s
    plain = problem.base_value / plain_s if problem.base_value else known
    nothing = Score(problem.base_value, problem.plain_s, problem.plain_s)
    if not problem.rows:
        return Priced(no_speculation(0), nothing, 0.0, plain)
    goodput = known or plain
    for _ in range(_PRICE_ROUNDS):
        price = waiting * goodput
        choice, result = best_choice(problem, price)
        before, goodput = goodput, result.value / (result.charged_s - prefill_s)
        if abs(goodput - before) <= _TOLERANCE * before:
            break
    if result.value > problem.base_value and goodput < least_gain * plain:
        choice, result, goodput = no_speculation(problem.rows), nothing, plain
    return Priced(choice, result, price, goodput)


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective that is found, and its score.

    It is never worse than no speculation, and within ``problem.limit_s``. Of equal choices the one
    with the fewest proposed tokens.
    """
    choice = no_speculation(problem.rows)
    result = score(problem, choice)
    if not np.count_nonzero(problem.ceiling) or not problem.last_total():
        return choice, result
    if problem.rows > 1:
        for scarcity in (1.0,) if problem.cap_s == math.inf else _SCARCITIES:
            choice, result = _joined(problem, price, scarcity, choice, result)
    if problem.rows <= _POLISHED_ROWS:
        choice = _polished(problem, price, choice, result.step_s)
        result = score(problem, choice)
    return choice, result


def _joined(
    problem: StepProblem,
    price: float,
    scarcity: float,
    choice: Choice,
    result: Score,
) -> tuple[Choice, Score]:
    """Return the better of a choice and what is best by the order in which tokens join, scored.

    Seconds count ``scarcity`` times their price for the order.
    """
    rows, last, dear = problem.rows, problem.last_total(), price * scarcity
    one_s = problem.added_s(1)
    token_s = np.minimum((problem.added_s(rows) - one_s) / (rows - 1), one_s).T[:, :, None]
    net = problem.gain - dear * (token_s + problem.row_s)
    charge = dear * (problem.charge_s + (problem.first_tokens - 1) * token_s[0])
    chains = np.cumsum(dear * (one_s.T - token_s[:, :, 0]) + np.zeros(net.shape[:2]), axis=0)
    slope = 0.0  # at first as if verification were free
    for _ in range(_SLOPES):
        worth = summed(np.maximum(net - slope, 0.0)) - charge
        longest = _opened(worth, chains)
        if not longest.any():
            break
        candidate = _on_staircases(problem, price, net, charge, worth, longest)
        scored = score(problem, candidate)
        if scored.objective(price) > result.objective(price) + TIE * (result.value + 1):
            choice, result = candidate, scored
        total = int(candidate.length.sum())
        low, high = max(total - total // 4 - 1, 0), min(total + total // 4 + 1, last)
        before, slope = slope, dear * (problem.verify_s.item(high) - problem.verify_s.item(low)) / (high - low)
        if abs(slope - before) <= _CLOSE:
            break
    return choice, result


def _opened(worth: FloatArray, chains: FloatArray) -> IntArray:
    """Return the longest chain of every draft, int64[D], 0 for those that stay closed.

    ``worth[K, D, n]`` is what a row has of a draft whose longest chain is k + 1, ``chains[K, D]``
    what its forwards cost all rows together.
    """
    drafts = worth.shape[1]
    longest, paid, own = np.zeros(drafts, np.int64), np.zeros(drafts), np.zeros(worth.shape[2])
    for _ in range(2 * drafts):
        gained = np.maximum(worth, own).sum(2) - np.maximum(chains - paid, 0.0)
        highest = float(gained.max())
        if not highest > float(own.sum()) + TIE:
            break
        k, d = divmod(int((gained >= highest - TIE).argmax()), drafts)  # of equal ones the shortest
        longest[d], paid[d] = k + 1, chains[k, d]
        own = np.maximum(own, worth[k, d])
    return longest


def _on_staircases(
    problem: StepProblem,
    price: float,
    net: FloatArray,
    charge: FloatArray,
    worth: FloatArray,
    longest: IntArray,
) -> Choice:
    """Return the best choice of one draft for each row by depth and total, as the tokens join.

    A charge is deducted from what a row's tokens are worth in proportion, so that its chain stays
    in order. Objectives are exact: each token adds what its draft's forward then takes longer.
    """
    (depths, rows), row = (int(longest.max()), problem.rows), np.arange(problem.rows)
    of_draft = worth[np.maximum(longest, 1) - 1, np.arange(len(longest))]
    pick = np.where(longest[:, None] > 0, of_draft, -np.inf).argmax(0)
    own = np.maximum(net[:depths, pick, row], 0.0)
    own[np.arange(depths)[:, None] >= longest[pick]] = 0.0
    own *= np.maximum(1 - charge[pick, row] / np.maximum(own.sum(0), _NOTHING), 0.0)
    count = min(int(np.count_nonzero(own)), problem.last_total())
    if not count:
        return no_speculation(rows)
    place = np.argsort(-own, axis=None, kind="stable")[:count]
    depth, i = np.divmod(place, rows)
    d, first = pick[i], depth == 0
    charged_s = _added_s(problem, d, depth, np.where(first, problem.first_tokens[d, i], 1))
    charged_s += problem.row_s[d, i] + first * problem.charge_s[d, i]
    within = depth <= np.arange(depths)[:, None]
    verify_s = problem.verify_s[np.cumsum(within, axis=1)] + problem.speculation_s
    joined = (problem.gain[depth, d, i] - price * charged_s) * within
    objective = np.cumsum(joined, axis=1) - price * verify_s
    if problem.cap_s < math.inf:
        uncharged_s = first * (problem.switch_s - problem.charge_s)[d, i]
        step_s = verify_s + np.cumsum((charged_s + uncharged_s) * within, axis=1)
        objective[step_s > problem.limit_s] = -np.inf
        if objective.max() == -np.inf:
            return no_speculation(rows)
    deepest, last = divmod(int(objective.argmax()), count)
    length = np.bincount(i[: last + 1][within[deepest, : last + 1]], minlength=rows)
    return Choice(np.where(length > 0, pick, NO_DRAFT), length)


def _added_s(problem: StepProblem, d: IntArray, depth: IntArray, tokens: IntArray) -> FloatArray:
    """Return the seconds that each of some joining rows adds to a forward of draft d at a depth,
    beside those that joined it before; float64 like ``d``, ``depth`` and ``tokens``.
    """
    forward = d * len(problem.gain) + depth
    by = forward.argsort(kind="stable")
    forward, joining = forward[by], tokens[by]
    before = joining.cumsum() - joining
    before -= before[forward.searchsorted(forward)]  # within one forward
    if problem.given is not None:
        before += problem.given.ravel()[forward]
    before += d[by] * problem.forward_s.shape[1]
    seconds = np.empty(len(d))
    seconds[by] = problem.forward_s.take(before + joining) - problem.forward_s.take(before)
    return seconds


def _polished(problem: StepProblem, price: float, choice: Choice, step_s: float) -> Choice:
    """Return the choice improved one row at a time by the change that gains most, until none does.
    The step takes ``step_s`` as chosen.

    A row's options O are none, every length of the first draft, of the second, and so on.
    """
    k_max, drafts, rows = problem.gain.shape
    draft, length, uses, covers = _options(drafts, k_max)
    depth, row = np.arange(1, k_max + 1)[:, None, None], np.arange(rows)
    alone_s = depth * problem.row_s
    alone = problem.value - price * (alone_s + problem.charge_s)
    alone[depth > problem.ceiling] = -np.inf
    own = _by_option(alone)
    joining = np.ones((rows, drafts * k_max), np.int64)
    joining[:, ::k_max] = problem.first_tokens.T
    start = np.arange(drafts).repeat(k_max) * problem.forward_s.shape[1]
    if problem.given is not None:
        start += problem.given.ravel()
    verify_s = problem.verify_s.copy()
    verify_s[1:] += problem.speculation_s
    capped = problem.cap_s < math.inf
    whole_s = _by_option(alone_s + problem.switch_s) if capped else own
    option = np.where(choice.length > 0, choice.draft * k_max + choice.length, 0)
    for _ in range(2 * rows - 1):
        mine = uses[option] * joining
        others = start + mine.sum(0) - mine
        added_s = problem.forward_s.take(others + joining) - problem.forward_s.take(others)
        rest = length[option]
        rest = rest.sum() - rest
        seconds = added_s @ covers + verify_s.take(np.add.outer(rest, length))
        objective = own - price * seconds
        gained = objective - objective[row, option][:, None]
        if capped:
            changed_s = seconds + whole_s
            changed_s -= changed_s[row, option][:, None]
            gained[step_s + changed_s > problem.limit_s] = -np.inf
        i, chosen = divmod(int(gained.argmax()), len(length))
        if not gained.item(i, chosen) > TIE * (problem.base_value + 1.0):
            break
        option[i] = chosen
        step_s += changed_s.item(i, chosen) if capped else 0.0
    return Choice(draft[option], length[option])


def _by_option(values: FloatArray) -> FloatArray:
    """Return values [K, D, n] by row and option, float64[n, O], 0 for none."""
    options = np.zeros((values.shape[2], 1 + values.shape[0] * values.shape[1]))
    options[:, 1:] = values.transpose(2, 1, 0).reshape(len(options), -1)
    return options


@lru_cache(maxsize=64)
def _options(drafts: int, k_max: int) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Return a row's options: draft[O], length[O], the forwards [O, D K] that each takes part in,
    and the same as a matrix [D K, O].
    """
    draft = np.r_[NO_DRAFT, np.arange(drafts).repeat(k_max)]
    length = np.r_[0, np.tile(np.arange(1, k_max + 1), drafts)]
    of_draft = draft[:, None] == np.arange(drafts).repeat(k_max)
    uses = of_draft & (length[:, None] > np.tile(np.arange(k_max), drafts))
    return draft, length, uses.astype(np.int64), uses.T.astype(np.float64)
