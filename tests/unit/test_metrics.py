from types import SimpleNamespace

import pytest

from backend.ipc.messages import StatsUpdate
from backend.ops.metric_names import FAMILIES, SPINDLE_FAMILIES, MetricKind
from backend.triton_adapter.metrics import MetricExporter


class FakeFamily:
    """Keeps what Triton's MetricFamily would."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, made, name, description, kind):
        assert description
        self.kind, self.series = kind, {}
        made[name] = self

    def Metric(self, labels, buckets=None):
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        key = tuple(sorted(labels.items()))
        assert key not in self.series, "a series made twice is an error in Triton"
        self.series[key] = FakeMetric()
        return self.series[key]


class FakeMetric:
    def __init__(self):
        self.value, self.values = 0, []

    def increment(self, delta):
        self.value += delta

    def set(self, value):
        self.value = value

    def observe(self, value):
        self.values.append(value)


@pytest.fixture
def made():
    """The families made so far, by name."""
    return {}


@pytest.fixture
def exporter(made):
    class MetricFamily(FakeFamily):
        def __init__(self, name, description, kind):
            super().__init__(made, name, description, kind)

    return MetricExporter(SimpleNamespace(MetricFamily=MetricFamily))


def message(counters=(), gauges=(), observations=()):
    return StatsUpdate(counters=counters, gauges=gauges, observations=observations)


def test_deltas_add_up_gauges_are_set_and_observations_recorded(exporter, made):
    for _ in range(2):
        exporter.update(
            message(
                [["spindle_steps_total", {}, 3], ["spindle_requests_total", {"outcome": "a"}, 5]],
                [["spindle_active_requests", {}, 4]],
                [["spindle_batch_size", {}, [1, 2]]],
            )
        )
    assert made["spindle_steps_total"].series[()].value == 6
    assert made["spindle_requests_total"].series[("outcome", "a"),].value == 10
    assert made["spindle_active_requests"].series[()].value == 4
    assert made["spindle_batch_size"].series[()].values == [1, 2, 1, 2]


def test_families_without_labels_are_visible_from_the_start(exporter, made):
    assert {name for name, family in made.items() if family.series} == {
        f.name for f in FAMILIES if not f.labels
    }


def test_unexpected_labels_are_refused(exporter):
    with pytest.raises(ValueError, match="spindle_draft_tokens_total has the labels"):
        exporter.update(message([["spindle_draft_tokens_total", {"model": "a"}, 1]]))


def test_the_table_is_sound():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(family.name.startswith("spindle_") for family in SPINDLE_FAMILIES)
    assert all(
        (family.kind is MetricKind.COUNTER) == family.name.endswith("_total")
        for family in SPINDLE_FAMILIES
    )
    for family in FAMILIES:
        assert bool(family.buckets) == (family.kind is MetricKind.HISTOGRAM)
        assert list(family.buckets) == sorted(set(family.buckets))


def test_metrics_of_a_hosted_engine_are_made_when_they_first_come(exporter, made):
    labels = {"engine": "0"}
    sent = [("vllm:tokens_total", labels, 3.0)]
    exporter.update(message(counters=sent, gauges=[("vllm:running", labels, 2.0)]))
    exporter.update(message(counters=sent))
    key = (("engine", "0"),)
    assert made["vllm:tokens_total"].series[key].value == 6.0
    assert (made["vllm:running"].kind, made["vllm:running"].series[key].value) == ("gauge", 2.0)
