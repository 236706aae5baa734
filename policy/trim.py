"""How many of each row's best nodes the target verifies, decided over the whole batch once the
drafts have proposed.

What drafting took is spent. A node is worth the chance that its path is what the target draws,
which is one more token of the row; the target's time for it has the plan's price. Of all rows'
nodes those worth most are verified, as many as leave the most: over the whole staircase, for one
step of it may lose what the next ones bring.
"""

from __future__ import annotations

import math

import numpy as np

from .calibration import Calibration
from .goodput import TIE
from .latency import VERIFY, LatencyModel
from .plan import Drafted, FloatArray, IntArray, Plan, View


def trimmed(
    latency: LatencyModel,
    correction: FloatArray,
    calibration: Calibration,
    view: View,
    plan: Plan,
    drafted: Drafted,
    aloft: int = 0,
) -> IntArray:
    """Return how many of each row's nodes are verified, int64[n]; view and plan are of these rows.

    ``aloft`` tokens of rows in flight are in the same pass. ``latency`` has the shape that was
    learnt for the target's curve. A plan without a price is followed as far as there are nodes. No
    step is longer than the view's cap, or than the plan where that is.
    """
    rows, nodes = len(view), len(drafted.row)
    if not plan.price or not nodes:
        return np.minimum(plan.length, np.bincount(drafted.row, minlength=rows))
    tokens = view.prefill_tokens + np.count_nonzero(view.ready) + aloft
    scale = correction.item(VERIFY)
    verify_s = scale * latency.target.run(tokens, nodes + 1)
    if view.cap_s < math.inf:
        planned_s = scale * latency.target.at(tokens + int(np.add.reduce(plan.length)))
        longest_s = planned_s + max(view.cap_s - plan.predicted_s, 0.0)
        verify_s = verify_s[: max(int(verify_s.searchsorted(longest_s * (1 + TIE), "right")), 1)]
    likely = calibration.probability(drafted.draft, drafted.drawn, drafted.confidence)
    return best_first(drafted.row, likely, verify_s, plan.price, rows)


def best_first(
    row: IntArray,
    worth: FloatArray,
    verify_s: FloatArray,
    price: float,
    rows: int,
) -> IntArray:
    """Return how many nodes of each row have the highest net worth, int64[rows].

    ``row[q]`` rises; ``worth[q]``, in tokens, does not within a row. ``verify_s[m]`` are the
    seconds of the pass with m nodes, ``price`` is of a second in tokens. Of equal choices it is
    the one with the fewest nodes.
    """
    order = (-worth).argsort(kind="stable") if rows > 1 else slice(None)
    net = np.zeros(len(verify_s))
    worth[order][: len(verify_s) - 1].cumsum(out=net[1:])
    net -= price * verify_s
    return np.bincount(row[order][: net.argmax()], minlength=rows)
