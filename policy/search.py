"""One search for a step's choice, and the one price of time that it is made at.

Drafts open one by one, as long as what the rows have of one more pays for its forwards, whose cost
is taken as linear in rows here: the greedy rule of facility location (Cornuejols, Fisher and
Nemhauser, 1977). Then tokens join in the order of what they bring, and the best depth and total win
by the real staircases of drafting and verification. In small batches the choice is polished by
changes of one row at a time, which is exact for a single row; there the last step's choice will do
to begin with.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .plan import NO_DRAFT, FloatArray, IntArray
from .problem import TIE, Choice, Score, StepProblem, no_speculation, score, summed

FEW_ROWS = 16  # beyond that no single row is much to the whole batch
# Rounds of pricing, and the change of price that ends them: what a price a little off loses is
# smaller still, and the next step goes on from it.
_COLD, _WARM = (4, 0.01), (2, 0.05)
_SLOPES = 2  # of verification tried at most
_SCARCITIES = (1.0, 3.0, 9.0)  # prices tried under a cap, as multiples: seconds are scarcer there
_NOTHING = 1e-300
_CLOSE = 0.05  # tokens: where the cost of verifying one more changes less, choices do not


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
    start: Choice | None = None,
) -> Priced:
    """Return the best choice at the price of time, from the ``known`` goodput (0: none) on.

    Dinkelbach's iteration (1967) finds the goodput that prices itself. A second of the step delays
    all that are admitted by one, and is worth what they would emit in it: the price is ``waiting``
    times the goodput, the number of admitted requests for each row that decodes. ``prefill_s`` is
    how much longer the step takes for its prefill. A small batch may ``start`` from a choice, for
    one that is allowed.
    """
    plain_s = problem.plain_s - prefill_s
    plain = problem.base_value / plain_s if problem.base_value else known
    if not problem.rows:
        return Priced(no_speculation(0), problem.plain, 0.0, plain)
    search, goodput = Search(problem), known or plain
    rounds, tolerance = _WARM if known else _COLD
    for _ in range(rounds):
        price = waiting * goodput
        choice, result = search.best(price, start)
        before, goodput = goodput, result.value / (result.charged_s - prefill_s)
        if abs(goodput - before) <= tolerance * before:
            break
    return Priced(choice, result, price, goodput)


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective that is found, and its score.

    It is never worse than no speculation, and within ``problem.limit_s``. Of equal choices the one
    with the fewest proposed tokens.
    """
    return Search(problem).best(price)


class Search:
    """A problem, with what of its search no price changes."""

    def __init__(self, problem: StepProblem) -> None:
        self._problem, self._last = problem, problem.last_total()
        self._capped = problem.cap_s < math.inf
        self._able = bool(self._last and np.count_nonzero(problem.ceiling))

    def best(self, price: float, start: Choice | None = None) -> tuple[Choice, Score]:
        """Return what ``best_choice`` does; a small batch from a choice on, where there is one."""
        problem = self._problem
        choice, result = no_speculation(problem.rows), problem.plain
        if not self._able:
            return choice, result
        if problem.rows > FEW_ROWS or (problem.rows > 1 and start is None):
            for scarcity in _SCARCITIES if self._capped else (1.0,):
                choice, result = self._joined(price, scarcity, choice, result)
        elif start is not None and problem.rows > 1:
            choice, result = self._better(price, start, choice, result)
        if problem.rows <= FEW_ROWS:
            choice, result = self._polished(price, choice, result)
        return choice, result

    def _better(
        self, price: float, candidate: Choice, choice: Choice, result: Score
    ) -> tuple[Choice, Score]:
        """Return the better of two choices, and its score."""
        found = score(self._problem, candidate)
        gained = found.objective(price) - result.objective(price)
        if found.step_s <= self._problem.limit_s and gained > TIE * (result.value + 1):
            return candidate, found
        return choice, result

    # -- all rows at once

    @cached_property
    def _lines(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds by the lines of the drafts' forwards: of a row's token [K, D, n], of its joining
        a draft [D, n], of opening all depths up to one [K, D].
        """
        problem = self._problem
        one_s, most_s = problem.added_s(1), problem.added_s(problem.rows)
        token_s = np.minimum((most_s - one_s) / (problem.rows - 1), one_s)
        opening_s = np.zeros(problem.gain.shape[:2]) + (one_s - token_s).T
        token_s = token_s.T[:, :, None]
        charge_s = problem.charge_s + (problem.first_tokens - 1) * token_s[0]
        return token_s + problem.draft_row_s, charge_s, opening_s.cumsum(axis=0)

    def _joined(
        self, price: float, scarcity: float, choice: Choice, result: Score
    ) -> tuple[Choice, Score]:
        """Return the better of a choice and what is best by the order in which tokens join, scored.

        Seconds count ``scarcity`` times their price for the order.
        """
        problem, dear = self._problem, price * scarcity
        token_s, charge_s, chain_s = self._lines
        net = problem.gain - dear * token_s
        charge, chains = dear * charge_s, dear * chain_s
        # What a verified token more costs. At first nothing: so the staircase is looked at to its
        # end; many rows smooth it, and begin around two tokens a row.
        slope = 0.0 if problem.rows <= FEW_ROWS else dear * self._slope_s(2 * problem.rows)
        for _ in range(_SLOPES):
            worth = summed(np.maximum(net - slope, 0.0)) - charge
            longest = _opened(worth, chains)
            if not max(longest):
                break
            candidate = self._on_staircases(price, net, charge, worth, longest)
            choice, result = self._better(price, candidate, choice, result)
            before, slope = slope, dear * self._slope_s(int(np.add.reduce(candidate.length)))
            if abs(slope - before) <= _CLOSE:
                break
        return choice, result

    def _slope_s(self, total: int) -> float:
        """Return the seconds of a verified token more, from a quarter below a total to as much
        above.
        """
        verify_s, near = self._problem.undrafted_s, total // 4 + 1
        low, high = max(min(total, self._last) - near, 0), min(total + near, self._last)
        return (verify_s.item(high) - verify_s.item(low)) / (high - low)

    def _on_staircases(
        self,
        price: float,
        net: FloatArray,
        charge: FloatArray,
        worth: FloatArray,
        longest: list[int],
    ) -> Choice:
        """Return the best choice of one draft for each row by depth and total, as the tokens join.

        A charge is deducted from what a row's tokens are worth in proportion, so that its chain
        stays in order. Objectives are exact: each token adds what its draft's forward then takes
        longer.
        """
        problem = self._problem
        (k_max, drafts, rows), depths = problem.gain.shape, max(longest)
        used = [d for d, k in enumerate(longest) if k]
        pick = np.array(used)[np.array([worth[longest[d] - 1, d] for d in used]).argmax(0)]
        place = pick * rows + np.arange(rows)
        own = net.reshape(k_max, -1)[:depths].take(place, 1)
        np.maximum(own, 0.0, out=own)
        own *= np.arange(depths)[:, None] < np.array(longest)[pick]
        own *= np.maximum(1 - charge.take(place) / np.maximum(np.add.reduce(own), _NOTHING), 0.0)
        count = min(int(np.count_nonzero(own)), self._last)
        if not count:
            return no_speculation(rows)
        order = (-own).ravel().argsort(kind="stable")[:count]
        depth, row = np.divmod(order, rows)
        first, place = depth == 0, place.take(row)
        tokens = np.where(first, problem.first_tokens.take(place), 1)
        charged_s = _added_s(problem, pick.take(row), depth, tokens)
        charged_s += problem.draft_row_s.take(place) + first * problem.charge_s.take(place)
        joined = problem.gain.take(depth * (drafts * rows) + place) - price * charged_s
        within = depth <= np.arange(depths)[:, None]
        verify_s = problem.undrafted_s.take(within.cumsum(axis=1)) + problem.speculation_s
        objective = (joined * within).cumsum(axis=1) - price * verify_s
        if self._capped:
            uncharged_s = first * (problem.switch_s - problem.charge_s).take(place)
            step_s = verify_s + ((charged_s + uncharged_s) * within).cumsum(axis=1)
            objective[step_s > problem.limit_s] = -np.inf
            if objective.max() == -np.inf:
                return no_speculation(rows)
        deepest, last = divmod(int(objective.argmax()), count)
        length = np.bincount(row[: last + 1][within[deepest, : last + 1]], minlength=rows)
        return Choice(np.where(length > 0, pick, NO_DRAFT), length)

    # -- one row at a time

    @cached_property
    def _options(self) -> tuple[FloatArray, FloatArray, FloatArray, IntArray, IntArray]:
        """What each row may do, O options: none, then every length by every draft (as [K, D]).

        Tokens [O, n]; seconds [O, n] that the row alone takes, as charged (inf: not to be had) and,
        catch-up whole, as they pass; the tokens that it adds to every forward [K D, n]; and where
        the seconds of each forward begin in ``forward_s``, given tokens included, [K D, 1].
        """
        problem = self._problem
        k_max, drafts, rows = problem.gain.shape
        value, charged_s = np.zeros((2, 1 + k_max * drafts, rows))
        depth = np.arange(1, k_max + 1)[:, None, None]
        alone_s = depth * problem.draft_row_s + problem.charge_s
        alone_s[depth > problem.ceiling] = np.inf
        value[1:], charged_s[1:] = (v.reshape(-1, rows) for v in (problem.value, alone_s))
        passing_s = charged_s
        if self._capped:
            passing_s = charged_s.copy()
            passing_s[1:] += np.tile(problem.switch_s - problem.charge_s, (k_max, 1))
        joining = np.ones((k_max * drafts, rows), np.int64)
        joining[:drafts] = problem.first_tokens
        begin = np.tile(np.arange(drafts) * problem.forward_s.shape[1], k_max)
        if problem.occupied is not None:
            begin += problem.occupied.T.ravel()
        return value, charged_s, passing_s, joining, begin[:, None]

    def _shared_s(self, option: IntArray, length: IntArray) -> FloatArray:
        """Return the seconds [O, n] of verification with each option of a row, the others' being
        ``option`` with these lengths, and by how much longer drafting takes for it.
        """
        problem, (*_, joining, begin) = self._problem, self._options
        k_max, drafts, rows = problem.gain.shape
        mine = _forwards_of(drafts, k_max).take(option, 1) * joining
        others = begin + (np.add.reduce(mine, 1)[:, None] - mine)
        added_s = problem.forward_s.take(others + joining) - problem.forward_s.take(others)
        rest = np.add.reduce(length) - length
        proposed = np.arange(1, k_max + 1)[:, None] + rest
        verify_s = problem.undrafted_s.take(proposed) + problem.speculation_s
        seconds = np.empty((1 + k_max * drafts, rows))
        seconds[0] = problem.undrafted_s.take(rest) + problem.speculation_s * (rest > 0)
        chains_s = summed(added_s.reshape(k_max, drafts, rows)) + verify_s[:, None]
        seconds[1:] = chains_s.reshape(-1, rows)
        return seconds

    def _polished(self, price: float, choice: Choice, result: Score) -> tuple[Choice, Score]:
        """Return the choice improved one row at a time by the change that gains most, until none
        does, and its score.
        """
        problem = self._problem
        _, drafts, rows = problem.gain.shape
        value, charged_s, passing_s, *_ = self._options
        own, row = value - price * charged_s, np.arange(rows)
        length = choice.length
        option = np.maximum(1 + (length - 1) * drafts + choice.draft, 0)
        step_s, changed = result.step_s, False
        for _ in range(2 * rows - 1):
            shared_s = self._shared_s(option, length)
            gained = own - price * shared_s
            gained -= gained[option, row]
            if self._capped:
                longer_s = shared_s + passing_s
                longer_s -= longer_s[option, row]
                gained[step_s + longer_s > problem.limit_s] = -np.inf
            chosen, i = divmod(int(gained.argmax()), rows)
            if not gained.item(chosen, i) > TIE * (problem.base_value + 1.0):
                break
            option[i], changed = chosen, True
            length = (option + drafts - 1) // drafts
            if self._capped:
                step_s += longer_s.item(chosen, i)
        if not changed:
            return choice, result
        choice = Choice(np.where(option > 0, (option - 1) % drafts, NO_DRAFT), length)
        return choice, score(problem, choice)


def _opened(worth: FloatArray, chains: FloatArray) -> list[int]:
    """Return the longest chain of every draft, 0 for those that stay closed.

    ``worth[K, D, n]`` is what a row has of a draft whose longest chain is k + 1, ``chains[K, D]``
    what its forwards cost all rows together.
    """
    _, drafts, rows = worth.shape
    longest, costs, own = [0] * drafts, chains, np.zeros(rows)
    for _ in range(2 * drafts):
        gained = np.add.reduce(np.maximum(worth, own), axis=2) - costs
        highest = gained.item(gained.argmax())
        if not highest > float(np.add.reduce(own)) + TIE:
            break
        k, d = divmod(int((gained >= highest - TIE).argmax()), drafts)  # of equal ones the shortest
        longest[d], own = k + 1, np.maximum(own, worth[k, d])
        costs = costs.copy()
        costs[:, d] = np.maximum(chains[:, d] - chains[k, d], 0.0)
    return longest


def _added_s(problem: StepProblem, d: IntArray, depth: IntArray, tokens: IntArray) -> FloatArray:
    """Return the seconds that each of some joining rows adds to a forward of draft d at a depth,
    beside those that joined it before; float64 like ``d``, ``depth`` and ``tokens``.
    """
    forward = d * len(problem.gain) + depth
    by = forward.argsort(kind="stable")
    forward, joining = forward.take(by), tokens.take(by)
    before = joining.cumsum() - joining
    before -= before.take(forward.searchsorted(forward))  # within one forward
    if problem.occupied is not None:
        before += problem.occupied.take(forward)
    before += d.take(by) * problem.forward_s.shape[1]
    seconds = np.empty(len(d))
    seconds[by] = problem.forward_s.take(before + joining) - problem.forward_s.take(before)
    return seconds


@lru_cache(maxsize=64)
def _forwards_of(drafts: int, k_max: int) -> IntArray:
    """Return which forwards each option takes part in, [K D, O]."""
    option, forward = np.arange(1 + k_max * drafts) - 1, np.arange(k_max * drafts)[:, None]
    alike = option % drafts == forward % drafts
    takes: IntArray = ((option >= 0) & alike & (forward <= option)).astype(np.int64)
    return takes
