"""The plug-in's own metrics, in the process that plans: ``spindle_*`` as
``backend.ops.metric_names`` has them, given to ``prometheus_client``, which vLLM brings.

Hosts plan in another process than the one that answers ``/metrics``. With
``PROMETHEUS_MULTIPROC_DIR`` set before the host starts, that page shows all its processes. Without
it, or as well, a port of the plug-in's own shows these metrics.
"""

from __future__ import annotations

import threading
from typing import Any

import prometheus_client

from backend.ops.metric_names import SPINDLE_FAMILIES, Metric, MetricKind
from backend.ops.stats import Stats

PERIOD_S = 1.0
_FAMILIES = {family.name: family for family in SPINDLE_FAMILIES}


class Exporter:
    """Exports metrics once in a period, from a thread that ends with the process."""

    def __init__(self, stats: Stats, port: int = 0, period_s: float = PERIOD_S) -> None:
        """Serve the metrics on the loopback if ``port`` is above 0. Raises OSError if it is in
        use.
        """
        self._stats, self._period_s = stats, period_s
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._stop = threading.Event()
        if port:
            prometheus_client.start_http_server(port, "127.0.0.1", self._registry)
        self._thread = threading.Thread(target=self._run, name="spindle-metrics", daemon=True)
        self._thread.start()

    def export(self) -> None:
        """Export what is new since the last time."""
        drained = self._stats.drain()
        for name, labels, amount in drained.counters:
            self._metric(name, labels).inc(amount)
        for name, labels, value in drained.gauges:
            self._metric(name, labels).set(value)
        for name, labels, values in drained.observations:
            metric = self._metric(name, labels)
            for value in values:
                metric.observe(value)

    def text(self) -> str:
        """Return the metrics in Prometheus' format."""
        exposed: bytes = prometheus_client.generate_latest(self._registry)
        return exposed.decode()

    def close(self) -> None:
        """End the thread and export once more."""
        self._stop.set()
        self._thread.join()
        self.export()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.export()

    def _metric(self, name: str, labels: dict[str, str]) -> Any:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = _make_metric(_FAMILIES[name], self._registry)
        return metric.labels(**labels) if labels else metric


def _make_metric(family: Metric, registry: Any) -> Any:
    named = family.name, family.help, family.labels
    if family.kind is MetricKind.COUNTER:
        return prometheus_client.Counter(*named, registry=registry)
    if family.kind is MetricKind.GAUGE:
        mode = "livemostrecent"
        return prometheus_client.Gauge(*named, registry=registry, multiprocess_mode=mode)
    return prometheus_client.Histogram(*named, registry=registry, buckets=family.buckets)
