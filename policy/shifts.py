"""When what was learnt no longer holds: tests for a sudden change of one request, and of all in flight."""

from __future__ import annotations

import numpy as np

from .plan import BoolArray, FloatArray

RECENT_KEEP = 0.75  # per chain: a memory of four; of chains learnt from together only what was before them fades
_REQUEST_DEVIATIONS, _COMMON_DEVIATIONS = 3.0, 8.0
_FLOOR = 0.3  # of a variance: one surprise alone, however unlikely, changes nothing
FEWEST_REQUESTS = 3.0


def abrupt(accepted: FloatArray, reached: FloatArray, expected: FloatArray) -> BoolArray:
    """Return where recent counts are further from what was expected than chance allows (arrays of one shape)."""
    variance = expected * (1 - expected / np.maximum(reached, 1e-9)) + _FLOOR
    changed: BoolArray = (accepted - expected) ** 2 > _REQUEST_DEVIATIONS**2 * variance
    return changed


def is_abrupt(accepted: float, reached: float, expected: float) -> bool:
    """Return ``abrupt`` of plain numbers."""
    variance = expected * (1 - expected / max(reached, 1e-9)) + _FLOOR
    return (accepted - expected) ** 2 > _REQUEST_DEVIATIONS**2 * variance


def common(mean: FloatArray, doubt: FloatArray, weight: FloatArray, pull: FloatArray) -> FloatArray:
    """Return by how much requests in flight all deviate from what was expected of them, logits [D], 0 where that may be chance.

    ``mean``, ``doubt`` (a variance), ``weight`` and ``pull`` [n, D] as in ``policy.deviation``: request i shows the common change with the
    variance doubt + 1 / weight. Fewer than three requests' worth of evidence cannot tell a change from difficult requests.
    """
    precision = weight / (1 + weight * doubt)
    total = np.maximum(precision.sum(0), 1e-9)
    change = (precision * (pull / np.maximum(weight, 1e-9) - mean)).sum(0) / total
    requests = total**2 / np.maximum((precision**2).sum(0), 1e-9)
    sure = (change**2 * total > _COMMON_DEVIATIONS**2) & (requests >= FEWEST_REQUESTS)
    found: FloatArray = np.where(sure, np.clip(change, -4.0, 4.0), 0.0)
    return found
