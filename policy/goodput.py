"""The joint choice of a draft and a length for every row: maximise sum_i w_i E[emitted_i] - price * T, T being shared by the batch.

With k_i <= remaining_i - 1 a step can never emit more than remains, so E[min(emitted, remaining)] = 1 + sum_{j<=k} s_j. The price of time
(lambda, in tokens per second) couples steps; the shared verification and the drafts' common forwards couple rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .plan import NO_DRAFT, FloatArray, IntArray

_TIE = 1e-9  # relative: of choices this close the one with the fewest tokens wins
_PASSES = 2
_LEADERS = 2  # so many of the token prices are worked out on the real staircase
_FAR = 1e9
_ZERO = np.zeros(1)


@dataclass(frozen=True, slots=True, eq=False)
class StepProblem:
    """One step's choice, n rows, D drafts, up to K tokens a row.

    Tokens: ``gain[n, D, K]`` expected and weighted, that position j adds (falling in j; positions beyond ``ceiling[n, D]`` are never
    chosen); ``base_value`` the weighted bonus tokens; ``first_tokens[n, D]`` read by a row's first draft forward (1 or 2).
    Seconds: ``verify_s[m]`` of the step with m proposed tokens, m = 0..n K, and no drafting, staircases allowed; ``speculation_s`` once if
    any row speculates; ``forward_s[D, t]`` of a draft forward of t tokens, t = 0..2n, 0 at 0; ``row_s[n, D]`` per row and draft forward on
    top (its KV); ``switch_s[n, D]`` of catch-up beyond the first tokens, which the objective spreads over ``horizon[n]`` steps.
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
    seconds += float(problem.forward_s[np.arange(drafts)[:, None], tokens].sum())
    switch_s = problem.switch_s[rows, draft]
    return Score(value, seconds + float((switch_s / problem.horizon[rows]).sum()), seconds + float(switch_s.sum()))


def best_choice(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Return the choice of the highest priced objective and its score; of equal ones that with the fewest proposed tokens.

    Exhaustive up to two rows; beyond them the coordinate ascent of ``_ascend``, never below the choice of no speculation.
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
    alone_s = problem.forward_s[draft, problem.first_tokens[row, draft]] + (length - 1) * problem.forward_s[draft, 1]
    value = np.where(length <= problem.ceiling[row, draft], gain - price * own_s, -np.inf)
    return np.concatenate([_ZERO, value]), np.concatenate([_ZERO, alone_s])


def _exhaustive(problem: StepProblem, price: float) -> Choice:
    rows, drafts, k_max = problem.gain.shape
    draft, length = _options(drafts, k_max)
    value, drafting_s = _row_options(problem, 0, price)
    total = length
    if rows == 2:
        other, other_s = _row_options(problem, 1, price)
        total, shorter, longer, common = _pairs(drafts, k_max)
        first_s = problem.forward_s[common, problem.first_tokens.sum(0)[common]]
        together_s = first_s + (shorter - 1) * problem.forward_s[common, 2] + (longer - shorter) * problem.forward_s[common, 1]
        drafting_s = np.where(common == NO_DRAFT, drafting_s[:, None] + other_s, together_s)
        value = value[:, None] + other
    objective = value - price * (drafting_s + problem.verify_s[total] + problem.speculation_s * (total > 0))
    best = float(objective.max())
    near = objective >= best - _TIE * (abs(best) + 1.0)
    winner = np.unravel_index(int(np.argmin(np.where(near, total, 2 * k_max + 1))), objective.shape)
    return Choice(draft[list(winner)], length[list(winner)])


# -- more rows: coordinate ascent over the longest chain of every draft


def _ascend(problem: StepProblem, price: float) -> tuple[Choice, Score]:
    """Fix the longest chain K_d of every draft, charge its shared forwards once, and every row chooses alone.

    For a few prices theta of a verified token (slopes of the staircase) and a few starts, coordinate ascent over the caps K_d; the best of
    these gives each row its draft; then sorted gains are added one by one and each total is scored on the real staircase.
    """
    rows, drafts, k_max = problem.gain.shape
    slope_s = (problem.forward_s[:, rows] - problem.forward_s[:, 1]) / (rows - 1)
    fixed = price * np.maximum(problem.forward_s[:, 1] - slope_s, 0.0)
    net = problem.gain - price * (slope_s[:, None] + problem.row_s[:, :, None])
    net = np.where(np.arange(k_max) < problem.ceiling[:, :, None], net, -np.inf)
    charge = price * (problem.charge_s + (problem.first_tokens - 1) * slope_s)
    theta = _token_prices(problem, price)

    by_row = np.ascontiguousarray(net.transpose(1, 2, 0))  # rows last: what is summed over rows lies together
    worth = np.zeros((len(theta), drafts, k_max + 1, rows))
    np.cumsum(np.maximum(by_row - theta[:, None, None, None], 0.0), axis=2, out=worth[:, :, 1:])
    worth = np.maximum(worth - charge.T[:, None], 0.0)
    caps = _ascend_caps(worth, fixed)
    draft, length, total = _rows_at(worth, caps, by_row, theta)
    tokens = length.sum(2)
    total += theta[:, None] * tokens - price * (problem.verify_s[tokens] + problem.speculation_s * (tokens > 0)) - (caps * fixed).sum(2)
    start = total.argmax(1)
    leaders = np.argsort(-total.max(1), kind="stable")[:_LEADERS]
    draft, length, caps = (array[leaders, start[leaders]] for array in (draft, length, caps))
    staircase = _on_staircase(problem, price, net, charge, fixed, draft, caps)
    return _best_of(problem, price, [no_speculation(rows), Choice(draft[0], length[0]), staircase])


def _token_prices(problem: StepProblem, price: float) -> FloatArray:
    """Return candidate prices of one verified token: the staircase's mean slopes between total lengths on a geometric grid."""
    last = len(problem.verify_s) - 1
    grid = np.unique(np.array([0, last // 8, last // 3, last]))
    slopes = np.diff(problem.verify_s[grid]) / np.diff(grid)
    prices: FloatArray = np.unique(np.concatenate([_ZERO, price * slopes]))
    return prices


def _ascend_caps(worth: FloatArray, fixed: FloatArray) -> IntArray:
    """Return caps [theta, start, D]: from one draft alone each, and from all, improve one draft's cap at a time."""
    prices, drafts, options, rows = worth.shape
    starts = np.vstack([np.eye(drafts, dtype=np.int64), np.ones((int(drafts > 1), drafts), np.int64)]) * (options - 1)
    caps = np.tile(starts, (prices, 1, 1))
    index = np.arange(prices)[:, None]
    current = worth[index[:, :, None], np.arange(drafts), caps]
    depth_cost = np.arange(options) * fixed[:, None]
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
    problem: StepProblem, price: float, net: FloatArray, charge: FloatArray, fixed: FloatArray, draft: IntArray, caps: IntArray
) -> Choice:
    """Return the best of every total under every common cap, for some drafts [leader, n] and caps [leader, D].

    Rows without a draft may join with their best one. Gains are sorted and added one by one, each total being scored on the real
    staircase. A row's key never rises along its chain, so that what is taken is always the head of the chain.
    """
    (rows, drafts, k_max), prices = net.shape, len(draft)
    net = np.concatenate([net[:, :, :1] - charge[:, :, None], net[:, :, 1:]], axis=2)
    used = (draft[:, :, None] == np.arange(drafts)).any(1)
    best_alone = (np.cumsum(net, axis=2).max(2) - np.where(used, 0.0, _FAR)[:, None]).argmax(2)
    draft = np.where(draft == NO_DRAFT, best_alone, draft)
    used = (draft[:, :, None] == np.arange(drafts)).any(1)
    own = net[np.arange(rows), draft]
    order = np.argsort(-np.minimum.accumulate(own, axis=2).reshape(prices, -1), axis=1, kind="stable")
    gains = np.take_along_axis(own.reshape(prices, -1), order, 1)
    row, depth = order // k_max, order % k_max
    common = np.broadcast_to(np.arange(1, k_max + 1)[:, None], (prices, k_max, drafts))
    all_caps = np.concatenate([common, caps[:, None]], axis=1)  # [leader, option, D]
    cap = np.take_along_axis(all_caps, np.take_along_axis(draft, row, 1)[:, None], 2)
    allowed = (depth[:, None] < cap) & (gains > -np.inf)[:, None]
    value = np.cumsum(np.where(allowed, gains[:, None], 0.0), axis=2)
    objective = value - price * problem.verify_s[np.cumsum(allowed, axis=2)] - ((all_caps * used[:, None]) @ fixed)[:, :, None]
    t, option, last = np.unravel_index(int(objective.argmax()), objective.shape)
    length = np.bincount(row[t, : last + 1][allowed[t, option, : last + 1]], minlength=rows)
    return Choice(np.where(length > 0, draft[t], NO_DRAFT), length)


def _best_of(problem: StepProblem, price: float, candidates: list[Choice]) -> tuple[Choice, Score]:
    """Return the best by the exact objective and its score; of near equals the first."""
    best, best_score = candidates[0], score(problem, candidates[0])
    for candidate in candidates[1:]:
        result, highest = score(problem, candidate), best_score.objective(price)
        if result.objective(price) > highest + _TIE * (abs(highest) + 1.0):
            best, best_score = candidate, result
    return best, best_score
