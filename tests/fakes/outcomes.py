"""Outcomes of steps, made of columns."""

from typing import Any

import numpy as np

from policy import IntArray, Outcome, StepRows, StepTimes

NONE = np.zeros(0, np.int64)


def outcome_of(
    request: IntArray,
    draft: IntArray,
    length: IntArray,
    accepted: IntArray,
    emitted: IntArray,
    scored: IntArray,
    verified: IntArray,
    measured_s: float,
    parts_s: dict[str, float] | None = None,
    followed: IntArray = NONE,
    **others: Any,
) -> Outcome:
    """Return the outcome of a step with these rows; ``others`` are fields of ``Outcome``."""
    columns = request, draft, length, accepted, emitted, scored, verified, followed
    return Outcome(StepRows(*columns), StepTimes(measured_s, parts_s or {}), **others)
