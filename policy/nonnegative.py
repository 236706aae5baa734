"""Least squares under the constraint that no coefficient is negative."""

from __future__ import annotations

import numpy as np

from .plan import FloatArray


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return x >= 0 minimising |matrix @ x - target| (float64[columns]).

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. Columns are scaled to unit length, so
    that counts of tokens and of rows weigh alike; a zero column gets 0.
    """
    scale = np.linalg.norm(matrix, axis=0)
    unit = np.divide(matrix, scale, out=np.zeros_like(matrix), where=scale > 0)
    x = np.zeros(unit.shape[1])
    free = np.zeros(unit.shape[1], np.bool_)
    for _ in range(10 * unit.shape[1]):
        gradient = np.where(free, -np.inf, unit.T @ (target - unit @ x))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10 * np.linalg.norm(target):
            break
        free[entering] = True
        x = _solve_free(unit, target, x, free)
    result: FloatArray = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    return result


def _solve_free(unit: FloatArray, target: FloatArray, x: FloatArray, free: np.typing.NDArray[np.bool_]) -> FloatArray:
    """Solve for the free columns, freezing (in ``free``) those that would turn negative on the way there."""
    while True:
        goal = np.zeros_like(x)
        goal[free] = np.linalg.lstsq(unit[:, free], target, rcond=None)[0]
        falling = free & (goal <= 0)
        if not falling.any():
            return goal
        step = float(np.min(x[falling] / (x[falling] - goal[falling] + 1e-300)))
        x = x + step * (goal - x)
        free &= ~(falling & (x <= 1e-14))
        x = np.where(free, x, 0.0)
