"""Which nodes of a batch are verified."""

import numpy as np

from .compiling import FLOATS, INTS, entry
from .search import Floats, Ints, descending


@entry(INTS[1], FLOATS[1], FLOATS[1], FLOATS[0], INTS[1])
def best_first(row: Ints, worth: Floats, verify_s: Floats, price: float, nodes: Ints) -> None:
    """Count into ``nodes[n]`` how many nodes of each row have the highest net worth together.

    ``row[q]`` rises; ``worth[q]``, in tokens, never does within a row. ``verify_s[m]`` are the
    seconds of a pass with m nodes. Of equal totals it is the lowest.
    """
    nodes[:] = 0
    order = np.empty(len(worth), np.int64)
    descending(worth, order)
    best, best_m, total = -price * verify_s[0], 0, 0.0
    for m in range(1, min(len(worth) + 1, len(verify_s))):
        total += worth[order[m - 1]]
        net = total - price * verify_s[m]
        if net > best:
            best, best_m = net, m
    for m in range(best_m):
        nodes[row[order[m]]] += 1
