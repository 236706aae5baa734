"""The engine's stats as Triton metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.ipc.messages import StatsUpdate
from backend.ops.metric_names import FAMILIES, Metric, MetricKind


class MetricExporter:
    """Feeds ``stats`` messages into ``pb_utils.MetricFamily`` objects; a series is made when its
    labels are first seen.

    Every update is a call into the server (about 0.03 ms), so this runs on the thread that received
    the message, never on a request's.
    """

    def __init__(self, pb_utils: Any) -> None:
        kinds = {
            MetricKind.COUNTER: pb_utils.MetricFamily.COUNTER,
            MetricKind.GAUGE: pb_utils.MetricFamily.GAUGE,
            MetricKind.HISTOGRAM: pb_utils.MetricFamily.HISTOGRAM,
        }
        self._make_family: Callable[[Metric], Any] = lambda family: pb_utils.MetricFamily(
            name=family.name, description=family.help, kind=kinds[family.kind]
        )
        self._families = {family.name: (family, self._make_family(family)) for family in FAMILIES}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        for family in FAMILIES:
            if not family.labels:
                self._metric(family.name, {}, family.kind)  # visible, at zero, from the start

    def update(self, message: StatsUpdate) -> None:
        """Apply one stats message."""
        for name, labels, delta in message.counters:
            self._metric(name, labels, MetricKind.COUNTER).increment(delta)
        for name, labels, value in message.gauges:
            self._metric(name, labels, MetricKind.GAUGE).set(value)
        for name, labels, values in message.observations:
            metric = self._metric(name, labels, MetricKind.HISTOGRAM)
            for value in values:
                metric.observe(value)

    def _metric(self, name: str, labels: dict[str, str], kind: MetricKind) -> Any:
        key = (name, tuple(sorted(labels.items())))
        if key not in self._series:
            if name not in self._families and ":" in name:
                self._add_foreign(name, labels, kind)
            family, triton_family = self._families[name]
            if set(labels) != set(family.labels):
                raise ValueError(f"{family.name} has the labels {family.labels}, got {labels}")
            buckets = (
                {"buckets": list(family.buckets)} if family.kind is MetricKind.HISTOGRAM else {}
            )
            self._series[key] = triton_family.Metric(labels=labels, **buckets)
        return self._series[key]

    def _add_foreign(self, name: str, labels: dict[str, str], kind: MetricKind) -> None:
        """Take up a metric of a hosted engine, whose names have a colon (``vllm:...``)."""
        family = Metric(name, kind, f"{name.partition(':')[0]}'s own", tuple(labels))
        self._families[name] = family, self._make_family(family)
