"""What a planner has learnt of some drafts, for one that plans with others: what is known of a draft goes with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .acceptance import AcceptanceConfig
from .calibration import COUNTS as NODE_COUNTS
from .plan import FloatArray

_PARTS = 2  # of the corrections the first are no draft's: verification and overhead
_COUNTS = ("draft_accepted", "draft_reached", *(f"calibration_{name}" for name in NODE_COUNTS))


def carried(data: Mapping[str, Any], before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Return what a planner of the drafts ``before`` has saved (``policy.learned``) as one of the drafts ``after`` can load it.

    Of a new draft nothing is known: requests are believed to differ by it as they do by any.
    """
    index = [list(before).index(name) if name in before else -1 for name in after]
    unknown, correction = AcceptanceConfig().request_variance, [*data["correction"], 1.0]
    return {
        **data,
        **{name: _taken(data[name], index).tolist() for name in _COUNTS},
        "variance": [unknown if i < 0 else data["variance"][i] for i in index],
        "correction": correction[:_PARTS] + [correction[i if i < 0 else _PARTS + i] for i in index],
        "groups": [_group(group, index) for group in data["groups"]],
    }


def _group(data: Mapping[str, Any], index: list[int]) -> dict[str, Any]:
    counts = {name: _taken(data[name], index).tolist() for name in ("accepted", "reached")}
    return {**data, **counts}


def _taken(values: Any, index: list[int]) -> FloatArray:
    """Return the rows of ``index``; -1 is zeros."""
    array = np.array(values, np.float64)
    rows: FloatArray = np.concatenate([array, np.zeros((1, *array.shape[1:]))]).take(index, 0)
    return rows
