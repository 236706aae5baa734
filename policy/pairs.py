"""All choices of one row or two beside the rest, at true costs: exact for up to three rows, and what improves a choice of a few more."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from .goodput import TIE, Choice, StepProblem
from .plan import NO_DRAFT, FloatArray, IntArray

MOST_ROWS = 3


class PairTable:
    """A problem under a price, prepared for the choices of two rows.

    A row's options are in the order none, every length of the first draft, of the second, ...: ``draft[O]`` and ``length[O]``.
    """

    def __init__(self, problem: StepProblem, price: float) -> None:
        self.problem, self._price = problem, price
        k_max, drafts, _ = problem.gain.shape
        self.draft, self.length, self.lengths, self._shorter = _options(drafts, k_max)
        depth = np.arange(k_max)[:, None, None]
        self._own = np.cumsum(problem.gain, axis=0) - price * ((depth + 1) * problem.row_s + problem.charge_s)
        self._own[depth >= problem.ceiling] = -np.inf
        self.joining: IntArray = np.where(depth == 0, problem.first_tokens, 1)
        self.given = np.zeros((k_max, drafts), np.int64) if problem.given is None else problem.given.T
        self._column = np.arange(drafts)[:, None]
        self._verify_cost = price * (problem.verify_s + problem.speculation_s * (np.arange(len(problem.verify_s)) > 0))

    def alone(self, row: IntArray, forwards: FloatArray) -> FloatArray:
        """Return what the options of rows are worth when they add ``forwards[K, D, P]`` seconds, float64[P, O], verification apart."""
        net = self._own[:, :, row] - self._price * np.cumsum(forwards, axis=0)
        options = np.zeros((len(row), len(self.length)))
        options[:, 1:] = net.transpose(2, 1, 0).reshape(len(row), -1)
        return options

    def verify(self, total: IntArray) -> FloatArray:
        """Return what verification costs with every option beside ``total[P]`` other tokens, float64[P, O]."""
        costs: FloatArray = self._verify_cost.take(total[:, None] + self.length, mode="clip")
        return costs

    def forward_s(self, tokens: IntArray) -> FloatArray:
        """Return the seconds of the drafts' forwards of int64[K, D, P] tokens."""
        seconds: FloatArray = self.problem.forward_s[self._column, tokens]
        return seconds

    def objectives(self, first: IntArray, second: IntArray, others: IntArray, total: IntArray, rows: IntArray) -> FloatArray:
        """Return the objective of every choice of two rows, float64[P, O, O], up to what the rest is worth and drafts.

        ``others[K, D, P]`` are the rest's tokens in the drafts' forwards, the given ones included, ``total[P]`` the tokens it has
        verified, ``rows[D, P]`` how many of it each draft serves.
        """
        before_s, one, two = self.forward_s(others), self.joining[:, :, first], self.joining[:, :, second]
        one_s, two_s = self.forward_s(others + one) - before_s, self.forward_s(others + two) - before_s
        saved = one_s + two_s + before_s - self.forward_s(others + one + two)
        objective: FloatArray = self.alone(first, one_s)[:, :, None] + self.alone(second, two_s)[:, None]
        objective -= self._verify_cost.take(total[:, None, None] + self.lengths, mode="clip")
        k_max, drafts, _ = saved.shape
        saved = self._price * np.cumsum(saved, axis=0)
        for d in range(drafts):
            block = slice(1 + d * k_max, 1 + (d + 1) * k_max)
            objective[:, block, block] += saved[self._shorter, d].transpose(2, 0, 1)
            if self.problem.limit is not None:
                spare = self.problem.limit[d] - rows[d]
                objective[spare < 2, block, block] = -np.inf
                objective[spare < 1, block] = objective[spare < 1, :, block] = -np.inf
        return objective


@lru_cache(maxsize=64)
def _options(drafts: int, k_max: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return by option its draft and length, by pair of options their tokens, by pair of lengths the index of the shorter."""
    length, depth = np.r_[0, np.tile(np.arange(1, k_max + 1), drafts)], np.arange(k_max)
    draft = np.r_[NO_DRAFT, np.repeat(np.arange(drafts), k_max)]
    return draft, length, np.add.outer(length, length), np.minimum.outer(depth, depth)


def best_of_all(problem: StepProblem, price: float) -> Choice:
    """Return the choice, for up to three rows, of the highest objective within the limits; of equal ones that with the fewest tokens."""
    rows = problem.rows
    if rows == 1:  # a row that can do nothing makes a pair of it
        problem = _with_idle_row(problem)
    objective = _all_objectives(PairTable(problem, price))
    if problem.cap_s < math.inf:
        as_seconds = replace(problem, gain=np.zeros_like(problem.gain), horizon=np.ones(len(problem.horizon)))
        objective = np.where(-_all_objectives(PairTable(as_seconds, 1.0)) <= problem.limit_s, objective, -np.inf)
    k_max, drafts, _ = problem.gain.shape
    draft, length, lengths, _ = _options(drafts, k_max)
    best = float(objective.max())
    near = (objective >= best - TIE * (abs(best) + problem.base_value + 1.0)).nonzero()
    total = length[near[0]] + lengths[near[1], near[2]] if rows == MOST_ROWS else lengths[near[1], near[2]]
    fewest = int(total.argmin())
    option = [int(axis[fewest]) for axis in near]
    option = (option[1:] + option[:1])[:rows]
    return Choice(draft[option], length[option])


def _with_idle_row(problem: StepProblem) -> StepProblem:
    column = ((0, 0), (0, 1))
    return replace(
        problem,
        gain=np.pad(problem.gain, ((0, 0), *column)),
        ceiling=np.pad(problem.ceiling, column),
        first_tokens=np.pad(problem.first_tokens, column),
        row_s=np.pad(problem.row_s, column),
        switch_s=np.pad(problem.switch_s, column),
        horizon=np.r_[problem.horizon, 1.0],
    )


def _all_objectives(table: PairTable) -> FloatArray:
    """Return the objectives of all choices, less the bonus tokens: [O, O, O] of the third, first and second row, or [1, O, O] of two."""
    k_max, drafts, rows = table.problem.gain.shape
    options = 1 if rows == 2 else len(table.length)
    which, none = np.arange(options), np.zeros(options, np.int64)
    alone, total, taken = np.zeros(options), none, np.zeros((drafts, options), np.int64)
    others = np.broadcast_to(table.given[:, :, None], (k_max, drafts, options))
    if rows == MOST_ROWS:
        third = none + 2
        forwards = table.forward_s(others + table.joining[:, :, third]) - table.forward_s(others)
        alone, total = table.alone(third, forwards)[which, which], table.length
        taken = (table.draft == np.arange(drafts)[:, None]).astype(np.int64)
        others = others + (taken & (np.arange(k_max)[:, None, None] < table.length)) * table.joining[:, :, third]
        if table.problem.limit is not None:
            alone = np.where((taken > table.problem.limit[:, None]).any(0), -np.inf, alone)
    return table.objectives(none, none + 1, others, total, taken) + alone[:, None, None]


def with_pair_changes(problem: StepProblem, price: float, choice: Choice) -> Choice:
    """Return the choice improved two rows at a time by the change that gains most, until none does."""
    table = PairTable(problem, price)
    first, second = np.triu_indices(problem.rows, 1)
    pairs = np.arange(len(first))
    draft, length = choice.draft.copy(), choice.length.copy()
    for _ in range(2 * problem.rows):
        member, tokens, option = _places(table, draft, length)
        others = (table.given + tokens.sum(2))[:, :, None] - tokens[:, :, first] - tokens[:, :, second]
        rows = member.sum(1)[:, None] - member[:, first] - member[:, second]
        objective = table.objectives(first, second, others, length.sum() - length[first] - length[second], rows)
        gained = objective.reshape(len(pairs), -1).max(1) - objective[pairs, option[first], option[second]]
        pair = int(gained.argmax())
        if not gained[pair] > TIE * (problem.base_value + 1.0):
            break
        chosen = list(np.unravel_index(int(objective[pair].argmax()), table.lengths.shape))
        both = [first[pair], second[pair]]
        draft[both], length[both] = table.draft[chosen], table.length[chosen]
    return Choice(draft, length)


def with_single_changes(problem: StepProblem, price: float, choice: Choice) -> Choice:
    """Return the choice improved one row at a time by the change that gains most, until none does."""
    table, every = PairTable(problem, price), np.arange(problem.rows)
    draft, length = choice.draft.copy(), choice.length.copy()
    for _ in range(4 * problem.rows):
        member, tokens, option = _places(table, draft, length)
        others = (table.given + tokens.sum(2))[:, :, None] - tokens
        forwards = table.forward_s(others + table.joining) - table.forward_s(others)
        objective = table.alone(every, forwards) - table.verify(length.sum() - length)
        if problem.limit is not None:
            full = (member.sum(1)[:, None] - member >= problem.limit[:, None]).T
            objective[:, 1:][full.repeat(len(problem.gain), axis=1)] = -np.inf
        gained = objective.max(1) - objective[every, option]
        row = int(gained.argmax())
        if not gained[row] > TIE * (problem.base_value + 1.0):
            break
        chosen = int(objective[row].argmax())
        draft[row], length[row] = table.draft[chosen], table.length[chosen]
    return Choice(draft, length)


def _places(table: PairTable, draft: IntArray, length: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return who is with which draft [D, n], the tokens [K, D, n] in its forwards, and the rows' options."""
    k_max, drafts, _ = table.problem.gain.shape
    member = ((draft == np.arange(drafts)[:, None]) & (length > 0)).astype(np.int64)
    tokens = (member & (np.arange(k_max)[:, None, None] < length)) * table.joining
    return member, tokens, np.where(length > 0, draft * k_max + length, 0)
