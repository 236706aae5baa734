"""How many rows a pass has.

OpenVINO prepares every operation again when the number of rows changes, which costs as much as
several rows. So a slightly narrower pass is padded to the width of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

MOST_ADDED = 16
_PROBED, _PROBES = (8, 9), 3


class PassWidth:
    """The rows of passes to come; ``rows`` the last one had. ``price``: as many rows take as long
    as a change; ``least``: fewer rows would take longer.
    """

    def __init__(self, price: float, least: int = 1) -> None:
        self.price, self._least = price, least
        self.reset()

    def reset(self) -> None:
        """Forget the passes before."""
        self.rows, self._added = 0, 0.0

    def of(self, rows: int) -> int:
        """Return how many rows the next pass has, for the number that it needs.

        Rows are added until they would cost more than the change that they save; a pass as wide
        as the one before begins that count again.
        """
        rows = max(rows, self._least)
        added = self.rows - rows
        if added < 0 or self._added + added > self.price:
            self.rows, added = rows, 0
        self._added = self._added + added if added else 0.0
        return self.rows


def price_of_change(run: Callable[[int], None]) -> float:
    """Return how many rows take as long as a change, at most ``MOST_ADDED``; ``run`` runs a pass of
    that many rows.
    """

    def seconds(rows: int) -> float:
        started = perf_counter()
        run(rows)
        return perf_counter() - started

    narrow_s = min(seconds(1) for _ in range(1 + _PROBES))
    times = [(seconds(rows), seconds(rows)) for _ in range(_PROBES) for rows in _PROBED]
    changed_s, same_s = (min(column) for column in zip(*times[1:], strict=True))
    row_s = (same_s - narrow_s) / (_PROBED[0] - 1)
    change_s = max(changed_s - same_s, 0.0)
    return min(change_s / row_s, MOST_ADDED) if row_s > 0 else MOST_ADDED
