"""Counters, observations and gauges as plain numbers; a reader drains them, none of them knows Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

Labels = tuple[tuple[str, str], ...]

MAX_OBSERVATIONS = 4096
"""Observations kept of one series between two drains; beyond that they are dropped and counted."""


class Stats:
    """What happened since the last drain. Written by the loop and IO threads, drained by whoever reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._observations: defaultdict[tuple[str, Labels], list[float]] = defaultdict(list)
        self._gauges: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        with self._lock:
            values = self._observations[name, tuple(sorted(labels.items()))]
            if len(values) < MAX_OBSERVATIONS:
                values.append(value)
            else:
                self._counters["spindle_fallback_total", (("reason", "observations_dropped"),)] += 1

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = value

    def drain(self) -> dict[str, list[list[Any]]]:
        """Return the deltas of the counters, the new observations and the gauges, and forget the first two."""
        with self._lock:
            counters, self._counters = self._counters, defaultdict(float)
            observations, self._observations = self._observations, defaultdict(list)
            gauges = dict(self._gauges)
        return {
            "counters": [[name, dict(labels), value] for (name, labels), value in counters.items()],
            "observations": [[name, dict(labels), values] for (name, labels), values in observations.items()],
            "gauges": [[name, dict(labels), value] for (name, labels), value in gauges.items()],
        }
