"""The joint choice of a draft and a length for every row: maximise sum_i w_i E[emitted_i] - price * T, T being shared by the batch.

With k_i <= remaining_i - 1 a step can never emit more than remains, so E[min(emitted, remaining)] = 1 + sum_{j<=k} s_j. The price of time
(lambda, in tokens per second) couples steps; the shared verification and the drafts' common forwards couple rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .plan import NO_DRAFT, FloatArray, IntArray

_TIE = 1e-9  # relative: of choices this close the one with the fewest tokens wins
_PASSES = 2
_LEADERS = 2  # so many of the token prices are worked out on the real staircase
_TRIMS = 4  # attempts to fit a choice under a limit on the step's time, whose estimate is of constant slopes
_SCARCITIES = (1.0, 8.0)  # prices of a second under such a limit, over the price of time
_FAR = 1e9
_ZERO = np.zeros(1)


@dataclass(frozen=True, slots=True, eq=False)
class StepProblem:
    """One step's choice, n rows, D drafts, up to K tokens a row.

    Tokens: ``gain[n, D, K]`` expected and weighted, that position j adds (falling in j; positions beyond ``ceiling[n, D]`` are never
    chosen); ``base_value`` the weighted bonus tokens; ``first_tokens[n, D]`` read by a row's first draft forward (1 or 2).
    Seconds: ``verify_s[m]`` of the step with m proposed tokens, m = 0..n K, and no drafting, staircases allowed; ``speculation_s`` once if
    any row speculates; ``forward_s[D, t]`` of a draft forward of t tokens, 0 at 0, up to 2n and the given ones; ``row_s[n, D]`` per row
    and draft forward on top (its KV); ``switch_s[n, D]`` of catch-up beyond the first tokens, which the objective spreads over
    ``horizon[n]`` steps.

    ``given[D, K]`` (None: none) are the tokens of rows outside this choice in the drafts' forwards. Those forwards are paid for in
    ``verify_s``; here they make the ones that share them cheaper. ``cap_s`` is the longest step to be chosen (see ``limit_s``).
    """

    gain: FloatArray
    ceiling: IntArray
    base_value: float
    verify_s: FloatArray
    speculation_s: float
    forward_s: FloatArray
    first_tokens: IntArray
    row_s: FloatArray
    switch_s: FloatArray
    horizon: FloatArray
    given: IntArray | None = None
    cap_s: float = math.inf

    @property
    def limit_s(self) -> float:
        """Seconds that no choice may exceed: the cap, or a step without speculation where that takes longer."""
        return max(self.cap_s, float(self.verify_s[0])) * (1 + _TIE)

    def added_s(self, tokens: IntArray | int) -> FloatArray:
        """Return the seconds [D, K], or [D, 1] for all alike, that so many tokens (broadcast) add to each draft's forwards."""
        draft = np.arange(len(self.forward_s))[:, None]
        if self.given is None:
            alone: FloatArray = self.forward_s[draft, tokens]
            return alone
        together: FloatArray = self.forward_s[draft, self.given + tokens] - self.forward_s[draft, self.given]
        return together

    def chain_s(self, rows: int) -> FloatArray:
        """Return the seconds [D, K + 1] that the forwards 2..k of ``rows`` chains of length k take."""
        forward_s = self.added_s(rows)
        if self.given is None:
            alike: FloatArray = np.maximum(np.arange(-1, self.gain.shape[2]), 0) * forward_s
            return alike
        return np.concatenate([np.zeros((len(forward_s), 2)), np.cumsum(forward_s[:, 1:], axis=1)], axis=1)

    @property
    def charge_s(self) -> FloatArray:
        """Catch-up seconds charged to this step, float64[n, D]."""
        spread: FloatArray = self.switch_s / self.horizon[:, None]
        return spread


class Choice(NamedTuple):
    """A draft (column or NO_DRAFT) and a length for every row, int64[n] each."""

    draft: IntArray
    length: IntArray


class Score(NamedTuple):
    """Expected weighted tokens, the seconds charged for them (catch-up spread over its horizon), and what the step itself takes."""

    value: float
    charged_s: float
    step_s: float

    def objective(self, price: float) -> float:
        """Return the priced objective, in tokens."""
        return self.value - price * self.charged_s


def no_speculation(rows: int) -> Choice:
    """Return the choice of k = 0 everywhere."""
    return Choice(np.full(rows, NO_DRAFT, np.int64), np.zeros(rows, np.int64))


def score(problem: StepProblem, choice: Choice) -> Score:
    """Return exact tokens and seconds of a choice."""
    rows = np.flatnonzero(choice.length > 0)
    if not len(rows):
        return Score(problem.base_value, float(problem.verify_s[0]), float(problem.verify_s[0]))
    draft, length = choice.draft[rows], choice.length[rows]
    _, drafts, k_max = problem.gain.shape
    value = problem.base_value + float(problem.gain[rows, draft][np.arange(k_max) < length[:, None]].sum())
    ending = np.bincount(draft * k_max + length - 1, minlength=drafts * k_max).reshape(drafts, k_max)
    tokens = ending[:, ::-1].cumsum(1)[:, ::-1]  # rows of each draft at each depth
    tokens[:, 0] = np.bincount(draft, problem.first_tokens[rows, draft], drafts)
    seconds = float(problem.verify_s[length.sum()]) + problem.speculation_s + float(length @ problem.row_s[rows, draft])
    seconds += float(problem.added_s(tokens).sum())
    switch_s = problem.switch_s[rows, draft]
    return Score(value, seconds + float((switch_s / problem.horizon[rows]).sum()), seconds + float(switch_s.sum()))


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective and its score; of equal ones that with the fewest proposed tokens.

    Choices over ``problem.limit_s`` do not count. Exhaustive up to two rows; beyond them the coordinate ascent of ``_ascend``, never below
    the choice of no speculation.
    """
    rows, drafts, k_max = problem.gain.shape
    if rows == 0 or drafts == 0 or k_max == 0 or not problem.ceiling.any():
        choice = no_speculation(rows)
    elif rows <= 2:
        choice = _exhaustive(problem, price)
    else:
        return _ascend(problem, price)
    return choice, score(problem, choice)


# -- one or two rows: every choice


@lru_cache(maxsize=64)
def _options(drafts: int, k_max: int) -> tuple[IntArray, IntArray]:
    """Return (draft, length) of a row's options in the order of length: none, then every draft at 1, at 2, ..."""
    length = np.repeat(np.arange(1, k_max + 1), drafts)
    return np.r_[NO_DRAFT, np.tile(np.arange(drafts), k_max)], np.r_[0, length]


@lru_cache(maxsize=64)
def _pairs(drafts: int, k_max: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return for all pairs of options [O, O]: total length, shorter and longer length, and the common draft or NO_DRAFT."""
    draft, length = _options(drafts, k_max)
    common = np.where((draft[:, None] == draft) & (length > 0), draft, NO_DRAFT)
    return length[:, None] + length, np.minimum.outer(length, length), np.maximum.outer(length, length), common


def _row_options(problem: StepProblem, row: int, price: float) -> tuple[FloatArray, FloatArray]:
    """Return (net value, seconds of drafting alone) of a row's options, float64[O]; options over the ceiling have value -inf."""
    _, drafts, k_max = problem.gain.shape
    draft, length = (options[1:] for options in _options(drafts, k_max))
    gain = np.cumsum(problem.gain[row], axis=1).T.ravel()  # [K, D], the order of the options
    own_s = length * problem.row_s[row, draft] + problem.charge_s[row, draft]
    alone_s = problem.added_s(problem.first_tokens[row][:, None])[draft, 0] + problem.chain_s(1)[draft, length]
    value = np.where(length <= problem.ceiling[row, draft], gain - price * own_s, -np.inf)
    return np.concatenate([_ZERO, value]), np.concatenate([_ZERO, alone_s])


def _row_own_s(problem: StepProblem, row: int) -> FloatArray:
    """Return the seconds of a row's options, float64[O], shared with no other row: reading its KV, and its whole catch-up."""
    draft, length = (options[1:] for options in _options(*problem.gain.shape[1:]))
    return np.concatenate([_ZERO, length * problem.row_s[row, draft] + problem.switch_s[row, draft]])


def _exhaustive(problem: StepProblem, price: float) -> Choice:
    rows, drafts, k_max = problem.gain.shape
    draft, length = _options(drafts, k_max)
    value, drafting_s = _row_options(problem, 0, price)
    total = length
    if rows == 2:
        other, other_s = _row_options(problem, 1, price)
        total, shorter, longer, common = _pairs(drafts, k_max)
        first_s = problem.added_s(problem.first_tokens.sum(0)[:, None])[common, 0]
        one_s, two_s = problem.chain_s(1), problem.chain_s(2)
        together_s = first_s + two_s[common, shorter] + one_s[common, longer] - one_s[common, shorter]
        drafting_s = np.where(common == NO_DRAFT, drafting_s[:, None] + other_s, together_s)
        value = value[:, None] + other
    seconds = drafting_s + problem.verify_s[total] + problem.speculation_s * (total > 0)
    objective = value - price * seconds
    if problem.cap_s < math.inf:
        own_s = _row_own_s(problem, 0) if rows == 1 else np.add.outer(_row_own_s(problem, 0), _row_own_s(problem, 1))
        objective = np.where(seconds + own_s <= problem.limit_s, objective, -np.inf)
    best = float(objective.max())
    near = objective >= best - _TIE * (abs(best) + 1.0)
    winner = np.unravel_index(int(np.argmin(np.where(near, total, 2 * k_max + 1))), objective.shape)
    return Choice(draft[list(winner)], length[list(winner)])


# -- more rows: coordinate ascent over the longest chain of every draft


class _Slopes(NamedTuple):
    """Drafting by constant slopes: ``token_s[D]`` of one more row in a forward, ``depth_s[D, K + 1]`` of a longest chain's forwards."""

    token_s: FloatArray
    depth_s: FloatArray

    @classmethod
    def of(cls, problem: StepProblem) -> _Slopes:
        """Return the slopes between one row and all rows."""
        rows, drafts, k_max = problem.gain.shape
        one_s = problem.added_s(1)
        token_s = (problem.added_s(rows) - one_s).mean(1) / (rows - 1)
        forward_s = np.broadcast_to(np.maximum(one_s - token_s[:, None], 0.0), (drafts, k_max))
        return cls(token_s, np.concatenate([np.zeros((drafts, 1)), np.cumsum(forward_s, axis=1)], axis=1))

    def caps_s(self, caps: IntArray) -> FloatArray:
        """Return the seconds of the forwards by draft, for caps [..., D]."""
        seconds: FloatArray = self.depth_s[np.arange(len(self.depth_s)), caps]
        return seconds


def _ascend(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Fix the longest chain K_d of every draft, charge its shared forwards once, and every row chooses alone.

    For a few prices theta of a verified token (slopes of the staircase) and a few starts, coordinate ascent over the caps K_d; the best of
    these gives each row its draft; then sorted gains are added one by one and each total is scored on the real staircase.
    """
    rows, drafts, k_max = problem.gain.shape
    slopes = _Slopes.of(problem)
    net = problem.gain - price * (slopes.token_s[:, None] + problem.row_s[:, :, None])
    net = np.where(np.arange(k_max) < problem.ceiling[:, :, None], net, -np.inf)
    charge = price * (problem.charge_s + (problem.first_tokens - 1) * slopes.token_s)
    theta = _token_prices(problem, price)

    by_row = np.ascontiguousarray(net.transpose(1, 2, 0))  # rows last: what is summed over rows lies together
    worth = np.zeros((len(theta), drafts, k_max + 1, rows))
    np.cumsum(np.maximum(by_row - theta[:, None, None, None], 0.0), axis=2, out=worth[:, :, 1:])
    worth = np.maximum(worth - charge.T[:, None], 0.0)
    caps = _ascend_caps(worth, price * slopes.depth_s)
    draft, length, total = _rows_at(worth, caps, by_row, theta)
    tokens = length.sum(2)
    total += theta[:, None] * tokens - price * (problem.verify_s[tokens] + problem.speculation_s * (tokens > 0))
    total -= price * slopes.caps_s(caps).sum(2)
    start = total.argmax(1)
    leaders = np.argsort(-total.max(1), kind="stable")[:_LEADERS]
    draft, length, caps = (array[leaders, start[leaders]] for array in (draft, length, caps))
    net[:, :, 0] -= charge
    staircase = _on_staircase(problem, price, net, net, slopes, draft, caps)
    best = _best_of(problem, price, [no_speculation(rows), Choice(draft[0], length[0]), staircase])
    return best if best[1].step_s <= problem.limit_s else _best_within(problem, price, net, slopes, draft, caps)


def _token_prices(problem: StepProblem, price: float) -> FloatArray:
    """Return candidate prices of one verified token: the staircase's mean slopes between total lengths on a geometric grid."""
    last = len(problem.verify_s) - 1
    grid = np.unique(np.array([0, last // 8, last // 3, last]))
    slopes = np.diff(problem.verify_s[grid]) / np.diff(grid)
    prices: FloatArray = np.unique(np.concatenate([_ZERO, price * slopes]))
    return prices


def _ascend_caps(worth: FloatArray, depth_cost: FloatArray) -> IntArray:
    """Return caps [theta, start, D]: from one draft alone each, and from all, improve one draft's cap at a time."""
    prices, drafts, options, rows = worth.shape
    starts = np.vstack([np.eye(drafts, dtype=np.int64), np.ones((int(drafts > 1), drafts), np.int64)]) * (options - 1)
    caps = np.tile(starts, (prices, 1, 1))
    index = np.arange(prices)[:, None]
    current = worth[index[:, :, None], np.arange(drafts), caps]
    for d in list(range(drafts)) * (_PASSES if drafts > 1 else 1):
        others = np.zeros((prices, len(starts), rows))
        for other in set(range(drafts)) - {d}:
            np.maximum(others, current[:, :, other], out=others)
        total = np.maximum(others[:, :, None], worth[:, None, d]).sum(3) - depth_cost[d]
        caps[:, :, d] = total.argmax(2)
        current[:, :, d] = worth[index, d, caps[:, :, d]]
    return caps


def _rows_at(worth: FloatArray, caps: IntArray, net: FloatArray, theta: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Return each row's (draft, length) [theta, start, n] under the caps, and the sum of what they are worth [theta, start]."""
    index = np.arange(len(theta))[:, None, None]
    current = worth[index, np.arange(caps.shape[2]), caps]
    draft, value = current.argmax(2), current.max(2)
    wanted = (net > theta[:, None, None, None]).sum(2)
    length = np.minimum(wanted[index, draft, np.arange(draft.shape[2])], np.take_along_axis(caps, draft, 2))
    length = np.where(value > 0, length, 0)
    return np.where(length > 0, draft, NO_DRAFT), length, value.sum(2)


def _on_staircase(
    problem: StepProblem,
    price: float,
    net: FloatArray,
    key: FloatArray,
    slopes: _Slopes,
    draft: IntArray,
    caps: IntArray,
    limit_s: float = math.inf,
) -> Choice:
    """Return the best of every total under every common cap, for some drafts [leader, n] and caps [leader, D].

    Rows without a draft may join with their best one. Gains ``net[n, D, K]``, catch-up deducted, are added one by one in the order of
    ``key[n, D, K]``, each total being scored on the real staircase; those that the slopes say to take longer than ``limit_s`` do not
    count. A row's key never rises along its chain, so that what is taken is always the head of the chain.
    """
    (rows, drafts, k_max), prices = net.shape, len(draft)
    used = (draft[:, :, None] == np.arange(drafts)).any(1)
    best_alone = (np.cumsum(net, axis=2).max(2) - np.where(used, 0.0, _FAR)[:, None]).argmax(2)
    draft = np.where(draft == NO_DRAFT, best_alone, draft)
    used = (draft[:, :, None] == np.arange(drafts)).any(1)
    falling = np.minimum.accumulate(key[np.arange(rows), draft], axis=2)
    order = np.argsort(-falling.reshape(prices, -1), axis=1, kind="stable")
    gains = np.take_along_axis(net[np.arange(rows), draft].reshape(prices, -1), order, 1)
    row, depth = order // k_max, order % k_max
    common = np.broadcast_to(np.arange(1, k_max + 1)[:, None], (prices, k_max, drafts))
    all_caps = np.concatenate([common, caps[:, None]], axis=1)  # [leader, option, D]
    cap = np.take_along_axis(all_caps, np.take_along_axis(draft, row, 1)[:, None], 2)
    allowed = (depth[:, None] < cap) & (gains > -np.inf)[:, None]
    value = np.cumsum(np.where(allowed, gains[:, None], 0.0), axis=2)
    shared_s = problem.verify_s[np.cumsum(allowed, axis=2)] + (slopes.caps_s(all_caps) * used[:, None]).sum(2)[:, :, None]
    objective = value - price * shared_s
    if limit_s < math.inf:
        own_s = _own_s(problem, slopes)[row, np.take_along_axis(draft, row, 1), depth]
        seconds = shared_s + problem.speculation_s + np.cumsum(np.where(allowed, own_s[:, None], 0.0), axis=2)
        objective = np.where(seconds <= limit_s, objective, -np.inf)
    t, option, last = np.unravel_index(int(objective.argmax()), objective.shape)
    if objective[t, option, last] == -np.inf:
        return no_speculation(rows)
    length = np.bincount(row[t, : last + 1][allowed[t, option, : last + 1]], minlength=rows)
    return Choice(np.where(length > 0, draft[t], NO_DRAFT), length)


def _own_s(problem: StepProblem, slopes: _Slopes) -> FloatArray:
    """Return the seconds [n, D, K] that each position of a row's chain adds to the step beside the verification, by the slopes."""
    own_s = np.broadcast_to(slopes.token_s[:, None] + problem.row_s[:, :, None], problem.gain.shape).copy()
    own_s[:, :, 0] += problem.switch_s + (problem.first_tokens - 1) * slopes.token_s
    return own_s


def _best_within(
    problem: StepProblem, price: float, net: FloatArray, slopes: _Slopes, draft: IntArray, caps: IntArray
) -> tuple[Choice, Score]:
    """Return the best choice within ``problem.limit_s`` among the given drafts [leader, n] and each draft alone.

    What is scarce under a limit is the step's own seconds, catch-up whole: a few prices of them order the rows. The slopes are not exact,
    so a choice that exceeds the limit after all is tried again with so much less.
    """
    rows, drafts, k_max = net.shape
    draft = np.vstack([draft, np.repeat(np.arange(drafts)[:, None], rows, axis=1)])
    caps = np.vstack([caps, np.full((drafts, drafts), k_max)])
    own_s = _own_s(problem, slopes)
    fits = problem.verify_s[0] + own_s[:, :, :1] <= problem.limit_s
    net = np.where(fits, net, -np.inf)
    candidates = [no_speculation(rows)]
    for scarcity in _SCARCITIES:
        aim_s = problem.limit_s
        for _ in range(_TRIMS):
            choice = _on_staircase(problem, price, net, net - scarcity * price * own_s, slopes, draft, caps, aim_s)
            over_s = score(problem, choice).step_s - problem.limit_s
            if over_s <= 0:
                candidates.append(choice)
                break
            aim_s -= over_s
    return _best_of(problem, price, candidates)


def _best_of(problem: StepProblem, price: float, candidates: list[Choice]) -> tuple[Choice, Score]:
    """Return the best by the exact objective and its score; of near equals the first."""
    best, best_score = candidates[0], score(problem, candidates[0])
    for candidate in candidates[1:]:
        result, highest = score(problem, candidate), best_score.objective(price)
        if result.objective(price) > highest + _TIE * (abs(highest) + 1.0):
            best, best_score = candidate, result
    return best, best_score
