"""One search for a step's choice, and the one price of time that it is made at.

Drafts open one by one, as long as what the rows have of one more pays for its forwards, which are
taken to cost a line's worth here: the greedy rule of facility location (Cornuejols, Fisher and
Nemhauser, 1977). Then tokens join in the order of what they bring, and the best depth and total win
by the real staircases of drafting and verification. In small batches the choice is polished by
changes of one row at a time, which is exact for a single row.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, Score, StepProblem, no_speculation, score, summed
from .plan import NO_DRAFT, FloatArray, IntArray

_FEW_ROWS = 16  # beyond that no single row is much to the whole batch
_COLD, _WARM = (4, 0.01), (2, 0.05)  # rounds of pricing, and an error that ends them: it costs in
# second order, and the next step goes on
_SLOPES = 2  # of verification tried at most
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
    nothing = _plain(problem)
    if not problem.rows:
        return Priced(no_speculation(0), nothing, 0.0, plain)
    search, goodput = _Search(problem), known or plain
    rounds, tolerance = _WARM if known else _COLD
    for _ in range(rounds):
        price = waiting * goodput
        choice, result = search.best(price)
        before, goodput = goodput, result.value / (result.charged_s - prefill_s)
        if abs(goodput - before) <= tolerance * before:
            break
    if result.value > problem.base_value and goodput < least_gain * plain:
        choice, result, goodput = no_speculation(problem.rows), nothing, plain
    return Priced(choice, result, price, goodput)


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective that is found, and its score.

    It is never worse than no speculation, and within ``problem.limit_s``. Of equal choices the one
    with the fewest proposed tokens.
    """
    return _Search(problem).best(price)


class _Search:
    """A problem, with what of its search no price changes."""

    def __init__(self, problem: StepProblem) -> None:
        self._problem, self._last = problem, problem.last_total()
        self._capped = problem.cap_s < math.inf

    def best(self, price: float) -> tuple[Choice, Score]:
        """Return what ``best_choice`` does."""
        problem = self._problem
        choice, result = no_speculation(problem.rows), _plain(problem)
        if not self._last or not np.count_nonzero(problem.ceiling):
            return choice, result
        if problem.rows > 1:
            for scarcity in _SCARCITIES if self._capped else (1.0,):
                choice, result = self._joined(price, scarcity, choice, result)
        if problem.rows <= _FEW_ROWS:
            choice, result = self._polished(price, choice, result)
        return choice, result

    @cached_property
    def _lines(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds by the lines of the drafts' forwards: of a row's token [K, D, n], of its joining a
        draft [D, n], of opening all depths up to one [K, D].
        """
        problem = self._problem
        one_s, most_s = problem.added_s(1), problem.added_s(problem.rows)
        token_s = np.minimum((most_s - one_s) / (problem.rows - 1), one_s)
        opening_s = np.zeros(problem.gain.shape[:2]) + (one_s - token_s).T
        token_s = token_s.T[:, :, None]
        charge_s = problem.charge_s + (problem.first_tokens - 1) * token_s[0]
        return token_s + problem.row_s, charge_s, opening_s.cumsum(axis=0)

    def _joined(
        self,
        price: float,
        scarcity: float,
        choice: Choice,
        result: Score,
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
        slope = 0.0 if problem.rows <= _FEW_ROWS else dear * self._slope_s(2 * problem.rows)
        for _ in range(_SLOPES):
            wanted = net - slope
            worth = summed(np.maximum(wanted, 0.0, out=wanted))
            worth -= charge
            longest = _opened(worth, chains)
            if not max(longest):
                break
            candidate = self._on_staircases(price, net, charge, worth, longest)
            scored = score(problem, candidate)
            if scored.objective(price) > result.objective(price) + TIE * (result.value + 1):
                choice, result = candidate, scored
            before, slope = slope, dear * self._slope_s(int(np.add.reduce(candidate.length)))
            if abs(slope - before) <= _CLOSE:
                break
        return choice, result

    def _slope_s(self, total: int) -> float:
        """Return the seconds of a verified token more, from a quarter below a total to a quarter
        above.
        """
        verify_s, near = self._problem.verify_s, total // 4 + 1
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
        depth = order // rows
        row = order - depth * rows
        first, place = depth == 0, place.take(row)
        tokens = np.where(first, problem.first_tokens.take(place), 1)
        charged_s = _added_s(problem, pick.take(row), depth, tokens)
        charged_s += problem.row_s.take(place) + first * problem.charge_s.take(place)
        joined = problem.gain.take(depth * (drafts * rows) + place) - price * charged_s
        within = depth <= np.arange(depths)[:, None]
        verify_s = problem.verify_s.take(within.cumsum(axis=1)) + problem.speculation_s
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

    @cached_property
    def _options(self) -> _Options:
        return _Options(self._problem)

    def _polished(self, price: float, choice: Choice, result: Score) -> tuple[Choice, Score]:
        """Return the choice improved one row at a time by the change that gains most, until none
        does, and its score.
        """
        problem, options = self._problem, self._options
        k_max, _, rows = problem.gain.shape
        own, row = options.value - price * options.charged_s, np.arange(rows)
        option = (choice.draft * k_max + choice.length) * (choice.length > 0)
        step_s, changed = result.step_s, False
        for _ in range(2 * rows - 1):
            shared_s = options.shared_s(option)
            gained = own - price * shared_s
            gained -= gained[row, option][:, None]
            if self._capped:
                longer_s = shared_s + options.whole_s
                longer_s -= longer_s[row, option][:, None]
                gained[step_s + longer_s > problem.limit_s] = -np.inf
            i, chosen = divmod(int(gained.argmax()), gained.shape[1])
            if not gained.item(i, chosen) > TIE * (problem.base_value + 1.0):
                break
            option[i], changed = chosen, True
            if self._capped:
                step_s += longer_s.item(i, chosen)
        if not changed:
            return choice, result
        choice = Choice(options.draft.take(option), options.length.take(option))
        return choice, score(problem, choice)


class _Options:
    """What every row may do, O options: none, every length of the first draft, of the second, ...

    ``draft[O]``, ``length[O]``; ``value[n, O]`` tokens; ``charged_s[n, O]`` seconds that the row
    alone takes, as charged (inf: not to be had), and ``whole_s[n, O]`` catch-up included.
    """

    def __init__(self, problem: StepProblem) -> None:
        k_max, drafts, rows = problem.gain.shape
        self.draft, self.length, self._uses, self._covers = _all_options(drafts, k_max)
        depth = np.arange(1, k_max + 1)[:, None, None]
        alone_s = depth * problem.row_s + problem.charge_s
        alone_s[depth > problem.ceiling] = np.inf
        self.value, self.charged_s = _by_option(problem.value), _by_option(alone_s)
        self.whole_s = self.charged_s
        if problem.cap_s < math.inf:
            self.whole_s = _by_option(alone_s + (problem.switch_s - problem.charge_s))
        self._joining = np.ones((rows, drafts * k_max), np.int64)
        self._joining[:, ::k_max] = problem.first_tokens.T
        self._start = _starts(drafts, k_max, problem.forward_s.shape[1])
        if problem.given is not None:
            self._start = self._start + problem.given.ravel()
        self._forward_s, self._verify_s = problem.forward_s, problem.verify_s.copy()
        self._verify_s[1:] += problem.speculation_s

    def shared_s(self, option: IntArray) -> FloatArray:
        """Return the seconds [n, O] of verification with each option of a row, the others' being
        ``option`` int64[n], and by how much longer drafting takes for it.
        """
        mine = self._uses.take(option, 0) * self._joining
        others = self._start + (np.add.reduce(mine) - mine)
        added_s = self._forward_s.take(others + self._joining) - self._forward_s.take(others)
        rest = self.length.take(option)
        rest = np.add.reduce(rest) - rest
        seconds: FloatArray = added_s.dot(self._covers)
        seconds += self._verify_s.take(np.add.outer(rest, self.length))
        return seconds


def _plain(problem: StepProblem) -> Score:
    """Return the score of no speculation."""
    return Score(problem.base_value, problem.plain_s, problem.plain_s)


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
    if problem.given is not None:
        before += problem.given.take(forward)
    before += d.take(by) * problem.forward_s.shape[1]
    seconds = np.empty(len(d))
    seconds[by] = problem.forward_s.take(before + joining) - problem.forward_s.take(before)
    return seconds


@lru_cache(maxsize=64)
def _starts(drafts: int, k_max: int, most: int) -> IntArray:
    """Return where the seconds of each draft's forwards [D, most] begin, int64[D K]."""
    return np.arange(drafts).repeat(k_max) * most


def _by_option(values: FloatArray) -> FloatArray:
    """Return values [K, D, n] by row and option, float64[n, O], 0 for none."""
    options = np.zeros((values.shape[2], 1 + values.shape[0] * values.shape[1]))
    options[:, 1:] = values.transpose(2, 1, 0).reshape(len(options), -1)
    return options


@lru_cache(maxsize=64)
def _all_options(drafts: int, k_max: int) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Return draft[O] and length[O] of a row's options, the forwards [O, D K] that each takes part
    in, and the same as a matrix [D K, O].
    """
    draft = np.r_[NO_DRAFT, np.arange(drafts).repeat(k_max)]
    length = np.r_[0, np.tile(np.arange(1, k_max + 1), drafts)]
    of_draft = draft[:, None] == np.arange(drafts).repeat(k_max)
    uses = of_draft & (length[:, None] > np.tile(np.arange(k_max), drafts))
    return draft, length, uses.astype(np.int64), uses.T.astype(np.float64)
