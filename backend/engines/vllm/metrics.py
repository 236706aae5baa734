"""vLLM's own metrics, passed on under their own names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backend.engines.hosted import Meters

PREFIX = "vllm:"
_SKIPPED = ("_created", "_info")
"""Ends of the names of samples that are no measurements."""


class Passing:
    """Passes on what is new of the families that ``prometheus_client`` has collected.

    Triton's histograms take single values only, so one of vLLM's becomes counters by the names of
    its samples, which is what a page shows of it: ``_bucket``, ``_sum`` and ``_count``.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, families: Iterable[Any]) -> None:
        """Count what has been added since the last time, and set the gauges."""
        for family in families:
            if not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                if sample.name.endswith(_SKIPPED):
                    continue
                if family.type == "gauge":
                    self._meters.gauge(sample.name, sample.value, **sample.labels)
                else:
                    self._count(sample)

    def _count(self, sample: Any) -> None:
        key = sample.name, tuple(sorted(sample.labels.items()))
        added = sample.value - self._before.get(key, 0.0)
        if added > 0 or key not in self._before:
            self._meters.count(sample.name, max(added, 0.0), **sample.labels)
        self._before[key] = sample.value
