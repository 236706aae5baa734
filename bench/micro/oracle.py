"""The best plan of a step by another road: the formulas of the design in plain loops, sharing no
code with the policy but its tables.

Up to three rows every choice is tried; up to eight, a dynamic program over the rows whose state is
how many rows each draft has at each depth. Instances are random: staircases, catch-up, ceilings,
remaining tokens, and where wanted a cap on the step's time (which enumeration alone knows) and rows
whose choice is given.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.micro.choices import step_problem
from policy import NO_DRAFT, LatencyCurve, LatencyModel, Plan, View
from policy.latency import Correction
from policy.loops.problem import StepProblem

Choice = tuple[tuple[int, int], ...]
"""(draft, length) by row."""

NOTHING = (NO_DRAFT, 0)


@dataclass(frozen=True)
class Instance:
    """A view, the hazards of its requests, the model of time with
    its correction, and the price.

    ``given`` are the options of the view's last rows, which are not to be chosen.
    """

    view: View
    hazard: npt.NDArray[np.float64]  # [rows, drafts, positions]
    latency: LatencyModel
    correction: npt.NDArray[np.float64]  # [2 + drafts]
    k_max: int
    horizon_steps: float
    price: float
    fixed_choices: Choice = ()

    def problem(self) -> StepProblem:
        """Return it as the search gets it."""
        view, times = self.view, Correction(self.correction).times(self.latency)
        if self.fixed_choices:
            length = np.full(len(view), -1)
            draft = np.full(len(view), NO_DRAFT)
            draft[self.rows :], length[self.rows :] = np.array(self.fixed_choices).T
            view = replace(view, control=length >= 0, control_plan=Plan(draft, length))
        hazard = self.hazard.transpose(2, 1, 0)
        return step_problem(times, view, hazard, self.k_max, self.horizon_steps)

    @property
    def rows(self) -> int:
        """Return how many rows are to be chosen for."""
        return len(self.view) - len(self.fixed_choices)

    def longest(self, row: int, draft: int) -> int:
        """Return the most tokens that a draft may propose for a row."""
        return int(min(self.view.ceiling[row, draft], self.view.remaining[row] - 1, self.k_max))

    def options(self, row: int) -> list[tuple[int, int]]:
        """Return a row's options."""
        if row >= self.rows:
            return [self.fixed_choices[row - self.rows]]
        drafts = range(len(self.view.drafts))
        return [NOTHING, *((d, k) for d in drafts for k in range(1, self.longest(row, d) + 1))]

    def worth(self, row: int, option: tuple[int, int]) -> float:
        """Return a row's tokens, less the price of what it alone takes: reading its KV, and its
        share of the catch-up.
        """
        draft, length = option
        if not length:
            return 1.0
        survival, tokens = 1.0, 1.0
        for j in range(length):
            survival *= float(self.hazard[row, draft, j])
            tokens += survival
        curve, scale = self.latency.drafts[draft], float(self.correction[2 + draft])
        reading_s = length * (curve.row_s + curve.context_s * float(self.view.context[row]))
        catchup_s = self._base(draft, self.unseen(row, draft)) - self._base(
            draft, self.first(row, draft)
        )
        steps = min(max(float(self.view.remaining[row]) / 2, 1.0), self.horizon_steps)
        return tokens - self.price * scale * (reading_s + catchup_s / steps)

    def unseen(self, row: int, draft: int) -> int:
        """Return the tokens that a draft reads for a row before it proposes."""
        return max(int(self.view.catchup[row, draft]), 1)

    def first(self, row: int, draft: int) -> int:
        """Return how many of them are no catch-up: a chain accepted whole leaves two tokens
        unseen.
        """
        return min(self.unseen(row, draft), 2)

    @cached_property
    def verify_s(self) -> list[float]:
        """Return the seconds of the step by proposed tokens, drafting apart."""
        view, target, rows = self.view, self.latency.target, len(self.view)
        seconds = []
        for proposed in range(rows * self.k_max + 1):
            tokens = view.prefill_tokens + rows + proposed
            base = (
                float(target.base(np.array(tokens)))
                + rows * target.row_s
                + float(view.context.sum()) * target.context_s
            )
            other = self.latency.overhead_s + (self.latency.speculation_s if proposed else 0.0)
            seconds.append(float(self.correction[0]) * base + other)
        return seconds

    def forwards_s(self, draft: int, tokens: tuple[int, ...]) -> float:
        """Return the seconds of a draft's forwards, each of the given number of ``tokens``."""
        return float(self.correction[2 + draft]) * sum(self._base(draft, t) for t in tokens if t)

    def objective(self, choice: Choice) -> float:
        """Return the priced objective of a choice for all rows; -inf where it breaks the cap."""
        shared_s = self.shared_s(choice)
        if self.view.cap_s < float("inf") and shared_s + self.alone_s(choice) > max(
            self.view.cap_s, self.plain_s
        ) * (1 + 1e-9):
            return -float("inf")
        return (
            sum(self.worth(row, option) for row, option in enumerate(choice))
            - self.price * shared_s
        )

    @cached_property
    def plain_s(self) -> float:
        """Return the seconds of the step if the rows that are free to choose propose nothing."""
        choice = (*[NOTHING] * self.rows, *self.fixed_choices)
        return self.shared_s(choice) + self.alone_s(choice)

    def alone_s(self, choice: Choice) -> float:
        """Return the seconds that single rows take: reading their KV, and their whole catch-up."""
        seconds = 0.0
        for row, (d, length) in enumerate(choice):
            if length:
                curve, scale = self.latency.drafts[d], float(self.correction[2 + d])
                seconds += (
                    scale * length * (curve.row_s + curve.context_s * float(self.view.context[row]))
                )
                seconds += scale * (
                    self._base(d, self.unseen(row, d)) - self._base(d, self.first(row, d))
                )
        return seconds

    def shared_s(self, choice: Choice) -> float:
        """Return the seconds of verification and of the drafts' forwards."""
        shared_s = self.verify_s[sum(length for _, length in choice)]
        for d in range(len(self.view.drafts)):
            group = [(row, length) for row, (draft, length) in enumerate(choice) if draft == d]
            depths = [sum(length > j for _, length in group) for j in range(1, self.k_max)]
            shared_s += self.forwards_s(d, (sum(self.first(row, d) for row, _ in group), *depths))
        return shared_s

    def _base(self, draft: int, tokens: int) -> float:
        return float(self.latency.drafts[draft].base(np.array(tokens)))


def best_by_enumeration(instance: Instance) -> float:
    """Return the highest objective of all choices, each tried."""
    options = [instance.options(row) for row in range(len(instance.view))]
    return max(instance.objective(choice) for choice in itertools.product(*options))


def best_by_rows(instance: Instance) -> float:
    """Return the highest objective by a dynamic program over the rows.

    The state is, by draft, the tokens of the first forward and the rows at every depth; what it
    reaches best is all that matters of how.
    """
    drafts, k_max = range(len(instance.view.drafts)), instance.k_max
    reached = {((0,) * (k_max + 1),) * len(drafts): 0.0}
    for row in range(len(instance.view)):
        steps = [
            (d, k, instance.worth(row, (d, k)), instance.first(row, d) if k else 0)
            for d, k in instance.options(row)
        ]
        following: dict[tuple[tuple[int, ...], ...], float] = {}
        for state, value in reached.items():
            for d, k, worth, first in steps:
                after = state
                if k:
                    tokens = (
                        state[d][0] + first,
                        *(n + (j < k) for j, n in enumerate(state[d][1:])),
                    )
                    after = (*state[:d], tokens, *state[d + 1 :])
                if value + worth > following.get(after, -float("inf")):
                    following[after] = value + worth
        reached = following
    return max(value + _share(instance, state) for state, value in reached.items())


def _share(instance: Instance, state: tuple[tuple[int, ...], ...]) -> float:
    seconds = instance.verify_s[sum(sum(tokens[1:]) for tokens in state)]
    for d, tokens in enumerate(state):
        seconds += instance.forwards_s(d, (tokens[0], *tokens[2:]))
    return -instance.price * seconds


def with_cap(instance: Instance, rng: np.random.Generator) -> Instance:
    """Return the instance under a cap on the step's time, somewhere around the steps that it may
    choose.
    """
    cap_s = instance.plain_s * float(rng.uniform(0.8, 2.0))
    return replace(instance, view=replace(instance.view, cap_s=cap_s))


def with_given(instance: Instance, rng: np.random.Generator) -> Instance:
    """Return the instance with its last row or two given: an option that they have, without a
    catch-up to be spread.
    """
    view = instance.view
    rows = len(view) - int(rng.integers(1, min(3, len(view))))
    catchup = view.catchup.copy()
    catchup[rows:] = np.minimum(catchup[rows:], 2)
    changed = replace(instance, view=replace(view, catchup=catchup))
    options = [changed.options(row) for row in range(rows, len(view))]
    return replace(
        changed, fixed_choices=tuple(row[int(rng.integers(len(row)))] for row in options)
    )


def drift(instance: Instance, choice: Choice, rng: np.random.Generator) -> Instance:
    """Return the instance a step later: some of the choice was accepted, drafts not used have
    more to catch up with, and hazards are estimated again.
    """
    view = instance.view
    emitted = np.array([1 + int(rng.integers(0, length + 1)) for _, length in choice])
    is_used = np.array([draft for draft, _ in choice])[:, None] == np.arange(len(view.drafts))
    following = replace(
        view,
        context=view.context + emitted,
        remaining=np.maximum(view.remaining - emitted, 1),
        catchup=np.where(
            is_used, rng.integers(1, 3, is_used.shape), view.catchup + emitted[:, None]
        ),
    )
    noise = rng.normal(0.0, 0.1, (*is_used.shape, 1)) + rng.normal(0.0, 0.02, instance.hazard.shape)
    odds = instance.hazard / (1 - instance.hazard) * np.exp(noise)
    return replace(
        instance,
        view=following,
        hazard=odds / (1 + odds),
        price=instance.price * float(rng.uniform(0.97, 1.03)),
    )


def random_instance(rng: np.random.Generator, rows: int, drafts: int, k_max: int) -> Instance:
    """Return an instance with everything that makes one hard."""
    shape = (rows, drafts)
    remaining = np.where(
        rng.random(rows) < 0.2, rng.integers(1, k_max + 2, rows), rng.integers(k_max + 1, 200, rows)
    )
    view = View(
        tuple(f"d{d}" for d in range(drafts)),
        np.arange(rows),
        rng.integers(10, 2000, rows),
        remaining,
        np.where(rng.random(shape) < 0.3, rng.integers(0, k_max + 1, shape), k_max),
        np.where(rng.random(shape) < 0.3, rng.integers(3, 400, shape), rng.integers(0, 3, shape)),
        prefill_tokens=int(rng.choice([0, 0, 37])),
    )
    target = _staircase(rng, 1.0, 37 + rows * (k_max + 1), 0.1)
    curves = tuple(
        _staircase(rng, float(rng.uniform(0.01, 0.3)), 2 * rows, 0.15) for _ in range(drafts)
    )
    hazard = rng.uniform(0.1, 0.98, (*shape, 1)) * rng.uniform(0.7, 1.0, (*shape, k_max))
    latency = LatencyModel(
        target, curves, overhead_s=0.02, speculation_s=float(rng.choice([0.0, 0.05]))
    )
    price = float(rng.uniform(0.5, 2.5)) * rows  # around the goodput, at which the question is open
    return Instance(view, hazard, latency, rng.uniform(0.8, 1.25, 2 + drafts), k_max, 16.0, price)


def _staircase(rng: np.random.Generator, first_s: float, tokens: int, stair: float) -> LatencyCurve:
    """Return a curve of flat treads and sudden stairs, each a share of the first forward high."""
    stairs = rng.exponential(stair, tokens) * (rng.random(tokens) < rng.choice([0.1, 0.4, 1.0]))
    base_s = first_s * (1 + np.concatenate([[0.0, 0.0], np.cumsum(stairs)]))
    return LatencyCurve(
        base_s,
        first_s * stair / 4,
        first_s * float(rng.choice([0.0, 0.01])),
        first_s * float(rng.choice([0.0, 1e-5])),
    )


def sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    """Return rows, drafts and positions of an instance small enough to enumerate."""
    rows = int(rng.integers(1, 4))
    return (
        rows,
        int(rng.integers(1, 4 if rows == 3 else 5)),
        int(rng.integers(1, {1: 9, 2: 6, 3: 3}[rows])),
    )
