"""What a planner has learnt of some drafts, for one that plans with others: what is known of a draft goes with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .acceptance import AcceptanceConfig
from .calibration import COUNTS as NODE_COUNTS
from .groups import WITHIN_SHARE
from .plan import FloatArray

_PARTS = 2  # of the corrections the first are no draft's: verification and overhead
_COUNTS = ("draft_accepted", "draft_reached", *(f"calibration_{name}" for name in NODE_COUNTS))


def carried(data: Mapping[str, Any], before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Return what a planner of the drafts ``before`` has saved (``policy.learned``) as one of the drafts ``after`` can load it.

    Of a new draft nothing is known: requests are believed to differ by it as they do by any, and independently of the others.
    """
    index = [list(before).index(name) if name in before else -1 for name in after]
    variance = AcceptanceConfig().request_variance

    def law(values: Any, start: float) -> list[Any]:
        square: FloatArray = _taken(values, index, 0, 1) + np.diag([start if i < 0 else 0.0 for i in index])
        return list(square.tolist())

    correction = [*data["correction"], 1.0]
    found = {
        **data,
        **{name: _taken(data[name], index, 0).tolist() for name in _COUNTS},
        "covariance": law(data["covariance"], variance),
        "correction": correction[:_PARTS] + [correction[i if i < 0 else _PARTS + i] for i in index],
    }
    known = [
        {**group, "precision": _taken(group["precision"], index, 0, 1).tolist(), "pull": _taken(group["pull"], index, 0).tolist()}
        for group in data["groups"]["known"]
    ]
    found["groups"] = {**data["groups"], "within": law(data["groups"]["within"], WITHIN_SHARE * variance), "known": known}
    return found


def _taken(values: Any, index: list[int], *axes: int) -> FloatArray:
    """Return the entries of ``index`` along each of ``axes``; -1 is zeros."""
    array = np.array(values, np.float64)
    for axis in axes:
        array = np.pad(array, [(0, int(axis == other)) for other in range(array.ndim)]).take(index, axis)
    return array
