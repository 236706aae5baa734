"""One step's choice as numbers: what every chain brings, what every forward costs, and the exact score of a choice.

The objective is sum_i E[emitted_i] - price * T, T being shared by the batch. With k_i <= remaining_i - 1 a step can never emit more
than remains, so E[min(emitted, remaining)] = 1 + sum_{j<=k} s_j. The price of time (lambda, in tokens per second) couples steps; the shared
verification and the drafts' common forwards couple rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .plan import NO_DRAFT, FloatArray, IntArray

TIE = 1e-9  # relative: of choices this close the one with the fewest tokens wins


class Choice(NamedTuple):
    """A draft (column or NO_DRAFT) and a length for every row, int64[n] each."""

    draft: IntArray
    length: IntArray


@dataclass(eq=False)
class StepProblem:
    """One step's choice: n rows, D drafts, up to K tokens a row. Rows come last, for what is summed
    over rows lies together.

    Tokens: ``gain[K, D, n]`` expected, that position j adds (falling in j; 0 beyond
    ``ceiling[D, n]``, where nothing is ever chosen); ``base_value`` the bonus tokens;
    ``first_tokens[D, n]`` read by a row's first draft forward (1 or 2).
    Seconds: ``verify_s[m]`` of the step with m proposed tokens, m = 0..n K, and no drafting,
    staircases allowed and inf where there is no room for so many; ``speculation_s`` once if any row
    speculates; ``forward_s[D, t]`` of a draft forward of t tokens, 0 at 0, up to 2n and the given
    ones; ``row_s[D, n]`` per row and draft forward on top (its KV); ``switch_s[D, n]`` of catch-up
    beyond the first tokens, which the objective spreads over ``horizon[n]`` steps. Neither
    ``verify_s`` nor ``forward_s`` ever falls.

    ``given[D, K]`` (None: none) are the tokens of rows outside this choice in the drafts' forwards.
    Those forwards are paid for in ``verify_s``; here they make the ones that share them cheaper.
    ``cap_s`` is the longest step to be chosen (see ``limit_s``).
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
    def rows(self) -> int:
        """Return n."""
        return self.gain.shape[2]

    @property
    def plain_s(self) -> float:
        """Return the seconds of the step without speculation."""
        return float(self.verify_s[0])

    @property
    def limit_s(self) -> float:
        """Seconds that no choice may exceed: the cap, or a step without speculation where that takes longer."""
        return max(self.cap_s, self.plain_s) * (1 + TIE)

    @cached_property
    def value(self) -> FloatArray:
        """What a chain of k + 1 tokens brings, float64[K, D, n]."""
        return summed(self.gain)

    @cached_property
    def charge_s(self) -> FloatArray:
        """Catch-up seconds charged to this step, float64[D, n]."""
        spread: FloatArray = self.switch_s / self.horizon
        return spread

    def added_s(self, tokens: IntArray | int) -> FloatArray:
        """Return the seconds [D, K], or [D, 1] for all alike, that so many tokens (broadcast) add to each draft's forwards."""
        drafts, most = self.forward_s.shape
        start = np.arange(0, drafts * most, most)[:, None]
        if self.given is None:
            return self.forward_s.take(start + tokens)
        return self.forward_s.take(start + self.given + tokens) - self.forward_s.take(start + self.given)

    def last_total(self) -> int:
        """Return the most tokens for which there is room."""
        last = len(self.verify_s) - 1
        return last if self.verify_s[last] < math.inf else int(np.searchsorted(self.verify_s, math.inf)) - 1


class Score(NamedTuple):
    """Expected tokens, the seconds charged for them (catch-up spread over its horizon), and what the step itself takes."""

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
    rows = choice.length.nonzero()[0]
    if not len(rows):
        return Score(problem.base_value, problem.plain_s, problem.plain_s)
    k_max, drafts, n = problem.gain.shape
    draft, length = choice if len(rows) == n else (choice.draft[rows], choice.length[rows])
    place = draft * n + rows
    value = problem.base_value + float(np.add.reduce(problem.value.take((length - 1) * (drafts * n) + place)))
    ends = np.bincount(draft * k_max + length - 1, minlength=drafts * k_max)
    tokens = ends.reshape(drafts, k_max).dot(_up_to(k_max))
    tokens[:, 0] = np.bincount(draft, problem.first_tokens.take(place), drafts)
    seconds = problem.verify_s.item(np.add.reduce(length)) + problem.speculation_s + float(length.dot(problem.row_s.take(place)))
    seconds += float(np.add.reduce(problem.added_s(tokens), axis=None))
    switch_s = problem.switch_s.take(place)
    charge_s = problem.charge_s.take(place)
    return Score(value, seconds + float(np.add.reduce(charge_s)), seconds + float(np.add.reduce(switch_s)))


@lru_cache(maxsize=64)
def _up_to(k_max: int) -> IntArray:
    """Return the matrix whose row k is 1 at positions up to k."""
    return np.tri(k_max, dtype=np.int64)


@lru_cache(maxsize=64)
def _sums(k_max: int) -> FloatArray:
    return np.tri(k_max)


def summed(values: FloatArray) -> FloatArray:
    """Return the cumulative sums over positions, float64[K, D, n], by a product of matrices, which is quicker."""
    sums: FloatArray = _sums(len(values)).dot(values.reshape(len(values), -1)).reshape(values.shape)
    return sums
