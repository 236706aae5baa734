"""Seconds of a step: non-negative in rows, tokens, depth and prompt tokens, with bends, and near
measured cells what these say themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.advise.load import Cell
from policy.latency import nonnegative_least_squares
from policy.plan import FloatArray

KNOTS = (8, 16, 32, 64, 128, 256, 512)
"""Tokens of a pass from which on each may cost more, if measured."""
TERMS = (
    "step",
    "row",
    "token",
    "loaded",
    "loaded_row",
    "speculates",
    "depth",
    "depth_row",
    "prompt_token",
)
"""A step, each row, token, [a draft is loaded], its rows, [it speculates], forward of the draft,
row of that, and prompt token.
"""
_HUBER = 0.05
"""Relative error from which on a cell counts less."""
_ROWS_OCTAVES, _LENGTHS = 1.2, 1.5
"""How far what a cell says beyond the terms carries: octaves of rows, tokens of length."""
_LEAST_NOISE = 0.004


@dataclass(frozen=True)
class StepLoad:
    """Steps on average, [steps] each."""

    rows: FloatArray
    """Decoding requests."""
    drafted: FloatArray
    """Proposed tokens of all rows."""
    length: FloatArray
    prompt: FloatArray
    """Prompt tokens."""
    loaded: FloatArray
    """1 if the server has a draft, else 0."""

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> StepLoad:
        """Return what the cells' steps had."""
        rows = [
            (c.row_steps, c.window["drafted"] or c.window["drafts"] * c.length, c.prompt_tokens)
            for c in cells
        ]
        per_step = np.array(rows, float) / np.array([[c.steps] for c in cells])
        lengths, loaded = ([float(x) for x in each] for each in _arms(cells))
        columns = per_step[:, 0], per_step[:, 1], np.array(lengths), per_step[:, 2]
        return cls(*columns, np.array(loaded))

    def terms(self, knots: Sequence[int]) -> FloatArray:
        """Return the terms of each step, [steps, terms]."""
        tokens = self.rows + self.drafted
        columns = [
            np.ones_like(tokens),
            self.rows,
            tokens,
            self.loaded,
            self.loaded * self.rows,
            (self.length > 0).astype(float),
            self.length,
            self.length * self.rows,
            self.prompt,
            *(np.maximum(tokens - knot, 0.0) for knot in knots),
        ]
        return np.stack(columns, 1)

    def nearness(self, other: StepLoad) -> FloatArray:
        """Return how much one step says of another, [steps, other steps], 1 of itself."""
        rows = np.log2(1 + self.rows)[:, None] - np.log2(1 + other.rows)
        lengths = self.length[:, None] - other.length
        unlike = 0.5 * np.abs(self.loaded[:, None] - other.loaded)
        near: FloatArray = np.exp(-0.5 * ((rows / _ROWS_OCTAVES) ** 2 + (lengths / _LENGTHS) ** 2))
        result: FloatArray = near * (1 - unlike)
        return result


def _arms(cells: Sequence[Cell]) -> tuple[list[int], list[bool]]:
    return [cell.length for cell in cells], [cell.loaded for cell in cells]


@dataclass(frozen=True)
class FittedTimes:
    """The fit, and what measured cells say beyond it."""

    coefficient: FloatArray
    """[terms] seconds of each of ``TERMS`` and of each token beyond each knot."""
    knots: tuple[int, ...]
    near: StepLoad
    pull: FloatArray
    """[steps] weights of the measured steps' nearness, as a logarithm of seconds."""
    noise: float
    """Standard deviation of the logarithm of a cell's seconds between blocks."""

    @classmethod
    def fit(
        cls,
        cells: Sequence[Cell],
        *,
        by_cpu: bool = False,
        weights: FloatArray | None = None,  # [cells]
    ) -> FittedTimes:
        """Fit the mean step of each cell by its relative error; one that something disturbed
        counts less.
        """
        load = StepLoad.of(cells)
        target = np.array([cell.seconds(by_cpu=by_cpu) for cell in cells])
        tokens = load.rows + load.drafted
        knots = tuple(k for k in KNOTS if (tokens < k).any() and (tokens > 1.5 * k).any())
        matrix = load.terms(knots)
        fit_weights = np.ones(len(cells)) if weights is None else weights
        weight = np.sqrt(fit_weights)
        for _ in range(4 if weights is None else 2):
            scaled = matrix * (weight / target)[:, None]
            coefficient = nonnegative_least_squares(scaled, weight)
            error = np.log(target) - np.log(np.maximum(matrix @ coefficient, 1e-12))
            weight = np.sqrt(
                fit_weights * np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-9))
            )
        noise = _noise(cells, error)
        signal = max(float(np.mean(error**2)) - noise**2, 0.0)
        near = signal * load.nearness(load)
        spread = noise**2 / np.maximum(fit_weights, 1e-3)
        return cls(coefficient, knots, load, signal * _solve(near, spread, error), noise)

    def seconds(self, load: StepLoad) -> FloatArray:
        """Return the seconds of steps."""
        fitted = load.terms(self.knots) @ self.coefficient
        result: FloatArray = fitted * np.exp(load.nearness(self.near) @ self.pull)
        return result


def _solve(
    near: FloatArray,  # [cells, cells]
    spread: FloatArray,  # [cells]
    error: FloatArray,  # [cells]
) -> FloatArray:
    solution: FloatArray = np.linalg.solve(near + np.diag(spread), error)
    return solution


def _noise(cells: Sequence[Cell], error: FloatArray) -> float:
    """Return how far blocks of the same cell differ in ``error[cells]``."""
    groups: dict[tuple[int, int, bool], list[float]] = {}
    for cell, value in zip(cells, error.tolist(), strict=True):
        groups.setdefault((cell.length, cell.in_flight, cell.loaded), []).append(value)
    several = [np.array(values) for values in groups.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
    return max(np.sqrt(squares / freedom) if freedom else 0.02, _LEAST_NOISE)
