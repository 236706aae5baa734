"""Counters, observations and gauges as plain numbers; a reader drains them, none of them knows
Prometheus.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from backend.ops import nvidia_metrics
from backend.ops.metric_names import Labelled
from backend.ops.nvidia_metrics import MODEL, Latest
from policy import Switches

Labels = tuple[tuple[str, str], ...]

MAX_OBSERVATIONS = 4096
"""Observations kept of one series between two drains; beyond that they are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a finished request consumed."""

    input_tokens: int
    output_tokens: int
    drafted: int
    """Over all of its steps, as is ``accepted``."""
    accepted: int
    times_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """When it arrived, was first admitted, and committed its first and its last token, on the
    loop's clock.
    """
    new_blocks: int = 0
    """Blocks of KV allocated for it."""
    reused_blocks: int = 0
    """Blocks of KV found."""
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(proposed, accepted) by draft, of those that proposed."""
    seed: int | None = None
    """The one that a sampled text was drawn with; None: greedy."""
    verified_steps: list[tuple[int, int]] = field(default_factory=list)
    """(proposed, accepted) tokens of each step that verified a proposal, in order."""
    k_max: int = 0
    """The longest proposal of any request, in tokens."""


@dataclass(slots=True)
class Reuse:
    """Totals of prefix reuse, in complete KV blocks of admitted sequences."""

    reused: int = 0
    missed: int = 0
    evicted: int = 0
    """Cached blocks that gave way."""
    tokens: int = 0
    """Tokens whose KV the target had at admission."""


class DrainedStats(NamedTuple):
    """Counters' increments, new observations, and gauges."""

    counters: list[Labelled]
    observations: list[Labelled]
    gauges: list[Labelled]


class Stats:
    """Events since the last drain. Written by the loop and IO threads, drained by whichever
    thread reports.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._observations: defaultdict[tuple[str, Labels], list[float]] = defaultdict(list)
        self._gauges: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name, tuple(sorted(labels.items()))] += amount

    def count_all(self, name: str, amounts: Iterable[tuple[Labels, float]]) -> None:
        """Add to the counters of a family, by labels in the order of their names."""
        with self._lock:
            for labels, amount in amounts:
                self._counters[name, labels] += amount

    def observe(self, name: str, *values: float, **labels: str) -> None:
        """Record values of a histogram."""
        with self._lock:
            series = self._observations[name, tuple(sorted(labels.items()))]
            room = MAX_OBSERVATIONS - len(series)
            series += values[:room]
            if room < len(values):
                self._counters["spindle_fallback_total", (("reason", "observations_dropped"),)] += (
                    len(values) - room
                )

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = value

    def drain(self) -> DrainedStats:
        """Return the deltas of the counters, the new observations and the gauges, and forget the
        first two.
        """
        with self._lock:
            counters, self._counters = self._counters, defaultdict(float)
            observations, self._observations = self._observations, defaultdict(list)
            gauges = dict(self._gauges)
        return DrainedStats(
            _with_labels(counters), _with_labels(observations), _with_labels(gauges)
        )


def _with_labels(values: Mapping[Any, Any]) -> list[Labelled]:
    return [(name, dict(labels), value) for (name, labels), value in values.items()]


def exclusive_parts(parts_s: dict[str, float]) -> dict[str, float]:
    """Return a step's times by part, seconds, so that none is counted twice.

    The policy learns from ``overhead``, which has planning and learning in it; readers of the
    metric get ``rest``, which has not.
    """
    parts = {part: seconds for part, seconds in parts_s.items() if part != "overhead"}
    if "overhead" in parts_s:
        within = parts.get("planning", 0.0) + parts.get("learning", 0.0)
        parts["rest"] = max(0.0, parts_s["overhead"] - within)
    return parts


class StepStats:
    """The service's metrics, one method per event; names as in ``backend.ops.metric_names``."""

    def __init__(self, stats: Stats, max_requests: int = 0, *, cpu_only: bool = True) -> None:
        """Count into ``stats``; ``max_requests`` is the in-flight batch's size, ``cpu_only`` that
        no engine uses a GPU.
        """
        self.counted = self._stats = stats
        self._switches = Switches()
        self._max_requests = max_requests
        self._cpu_only = cpu_only
        self._latest = Latest()
        self._preempted = 0
        self._between_s: defaultdict[str, list[float]] = defaultdict(list)  # by arm, of this step

    def export(self) -> None:
        """Set the gauges that show the latest step (any thread)."""
        latest, gauge = self._latest, self._stats.gauge
        gauge("spindle_active_requests", latest.active)
        gauge("spindle_queued_requests", latest.queued)
        for state, blocks in latest.kv_blocks.items():
            gauge("spindle_kv_blocks", blocks, state=state)
        for part, ratio in latest.drift.items():
            gauge("spindle_latency_drift", ratio, part=part)
        nvidia_metrics.export(latest, self._max_requests, self._cpu_only, gauge)
        # there is none, but the series are expected
        for kind in ("kv_cache_transfer_ms", "request_count"):
            self._stats.count(
                "nv_trt_llm_disaggregated_serving_metrics",
                0,
                disaggregated_serving_type=kind,
                **MODEL,
            )

    def count_finished(self, usage: Usage) -> None:
        """Record the lengths of a request that succeeded."""
        self._stats.observe(
            "nv_llm_input_token_len",
            usage.input_tokens,
            response_metric_type="total_input_tokens",
            **MODEL,
        )
        self._stats.observe(
            "nv_llm_output_token_len",
            usage.output_tokens,
            response_metric_type="total_output_tokens",
            **MODEL,
        )

    def switches(self, switches: Switches) -> None:
        """Set the gauges of the switches; what is counted from now on is labelled by them (any
        thread).
        """
        self._switches = switches
        for mode in ("on", "off", "shadow"):
            self._stats.gauge(
                "spindle_speculation_mode", float(mode == switches.speculation), mode=mode
            )
        self._stats.gauge("spindle_canary_share", switches.canary_share)
        self._stats.gauge("spindle_inter_token_cap_seconds", switches.inter_token_cap_s)

    def arm(self, control: bool) -> str:
        """Return the arm that requests are of, as a label."""
        return self._switches.arm(control)

    def request(self, outcome: str) -> None:
        """Count a request that got its final reply."""
        self._stats.count("spindle_requests_total", outcome=outcome)

    def fallback(self, reason: str) -> None:
        """Count an event that made the service do less than it was configured to."""
        self._stats.count("spindle_fallback_total", reason=reason)

    def emission(self, since_arrival_s: float, since_last_s: float | None, control: bool) -> None:
        """Record one emission of a request (one or more tokens): the first one is its time to first
        token; the others are recorded with their step.
        """
        arm = self.arm(control)
        if since_last_s is None:
            self._stats.observe("spindle_time_to_first_token_seconds", since_arrival_s, arm=arm)
        else:
            self._between_s[arm].append(since_last_s)

    def preemption(self) -> None:
        """Count a request that gave its KV back and waits to be resumed."""
        self._preempted += 1
        self._stats.count("spindle_preemptions_total")

    def reuse(self, reuse: Reuse) -> None:
        """Count prefix reuse since the last time."""
        for event, blocks in (
            ("reused", reuse.reused),
            ("missed", reuse.missed),
            ("evicted", reuse.evicted),
        ):
            if blocks:
                self._stats.count("spindle_kv_block_events_total", blocks, event=event)
        self._latest.reused_blocks += reuse.reused
        if reuse.tokens:
            self._stats.count("spindle_kv_reused_tokens_total", reuse.tokens)

    def state(
        self,
        active: int,
        queued: int,
        kv_blocks: dict[str, int],
        drift: dict[str, float],
        rows: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Note what the gauges show of the latest step: load, KV blocks by state, and measured over
        predicted time by part of the step.

        ``rows``: how many requests decoded and prefilled, and the tokens of the latter.
        """
        before = self._latest
        steps = before.steps + (rows[0] + rows[1] > 0)
        self._latest = Latest(
            active, queued, *rows, self._preempted, kv_blocks, steps, before.reused_blocks, drift
        )
        self._preempted = 0

    def step(self, rows: int, measured_s: float, parts_s: dict[str, float]) -> None:
        """Record one step of some requests, its time and that of its parts."""
        self._stats.count("spindle_steps_total")
        self._stats.observe("spindle_batch_size", rows)
        self._stats.observe("spindle_step_seconds", measured_s)
        self._stats.observe("spindle_planning_seconds", parts_s.get("planning", 0.0))
        parts = exclusive_parts(parts_s).items()
        self._stats.count_all(
            "spindle_step_part_seconds_total",
            (((("part", part),), seconds) for part, seconds in parts),
        )
        for arm, seconds in self._between_s.items():
            self._stats.observe("spindle_inter_token_seconds", *seconds, arm=arm)
        self._between_s.clear()
