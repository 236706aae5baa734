"""The metric families of the service: the engine process names them, the Triton model ``spindle``
exports them on ``/metrics``.

Counters and histograms only count; rates are the reader's. ``arm`` is whose choice was applied:
``planner`` or, in a canary, ``fixed``; ``off`` and ``shadow`` while speculation is. Acceptance per
position is ``rate(spindle_accepted_tokens_by_position_total) /
rate(spindle_draft_tokens_by_position_total)``; how far a draft's confidence is to be believed is
``rate(spindle_draft_nodes_held_total) / rate(spindle_draft_nodes_total)`` by ``claimed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

Labelled = tuple[str, dict[str, str], Any]
"""A metric's name, its labels, and a value or values."""


class MetricKind(Enum):
    """The quantity that a family measures."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family: its labels are always given together; ``buckets`` (upper bounds) belong to
    histograms.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_STEP_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
)
_PLANNING_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

SPINDLE_FAMILIES: tuple[Metric, ...] = (
    Metric("spindle_steps_total", _C, "Steps of the in-flight batch"),
    Metric(
        "spindle_draft_tokens_total",
        _C,
        "Verified proposed tokens, by draft and arm",
        ("draft", "arm"),
    ),
    Metric(
        "spindle_accepted_tokens_total",
        _C,
        "Proposed tokens that the target accepted, by draft and arm",
        ("draft", "arm"),
    ),
    Metric(
        "spindle_verified_proposals_total",
        _C,
        "Verified proposals, one per request and step, by draft and arm",
        ("draft", "arm"),
    ),
    Metric(
        "spindle_draft_tokens_by_position_total",
        _C,
        "Proposed tokens, by draft and position (from 1)",
        ("draft", "position"),
    ),
    Metric(
        "spindle_accepted_tokens_by_position_total",
        _C,
        "Accepted tokens, by draft and position",
        ("draft", "position"),
    ),
    Metric(
        "spindle_draft_nodes_total",
        _C,
        "Proposed tokens that were verified, or whose predecessor was, by draft, by whether they "
        "were sampled, and by the upper edge of their path's bin of claimed confidence",
        ("draft", "drawn", "claimed"),
    ),
    Metric(
        "spindle_draft_nodes_held_total",
        _C,
        "Those of spindle_draft_nodes_total whose whole path the target drew",
        ("draft", "drawn", "claimed"),
    ),
    Metric(
        "spindle_emitted_tokens_total",
        _C,
        "Emitted tokens (accepted and bonus), by the draft and arm of their step",
        ("draft", "arm"),
    ),
    Metric(
        "spindle_requests_total",
        _C,
        "Requests that got their final reply, by outcome",
        ("outcome",),
    ),
    Metric(
        "spindle_preemptions_total",
        _C,
        "Times an active request gave its KV back to older ones and resumed later",
    ),
    Metric(
        "spindle_fallback_total",
        _C,
        "Times the service did less than configured, by reason",
        ("reason",),
    ),
    Metric(
        "spindle_draft_length",
        _H,
        "Planned speculation length per request and step, in tokens",
        ("draft", "arm"),
        _LENGTH_BUCKETS,
    ),
    Metric("spindle_batch_size", _H, "Requests per step", (), _BATCH_BUCKETS),
    Metric("spindle_step_seconds", _H, "Measured time of a step", (), _STEP_BUCKETS_S),
    Metric(
        "spindle_step_part_seconds_total",
        _C,
        "Time of steps by part: planning, learning (from the step before), draft:NAME, verify, "
        "rest. Parts add up to the time of the steps; work hidden by the target's pass "
        "(lookahead) is in none",
        ("part",),
    ),
    Metric("spindle_step_predicted_seconds", _H, "Predicted time of a step", (), _STEP_BUCKETS_S),
    Metric(
        "spindle_drafted_steps_total",
        _C,
        "Steps in which drafts proposed more than 4 tokens, by the number of nodes that the "
        "target verified: 0, 1 or more. Below 2, drafting was in vain",
        ("verified",),
    ),
    Metric(
        "spindle_promised_seconds_total",
        _C,
        "Predicted time of steps without prompts, by rows; compare with "
        "spindle_planned_step_seconds_total",
        ("rows",),
    ),
    Metric(
        "spindle_planned_step_seconds_total", _C, "Measured time of these steps, by rows", ("rows",)
    ),
    Metric(
        "spindle_promised_tokens_total",
        _C,
        "Predicted tokens of these steps, by rows; compare with spindle_planned_step_tokens_total",
        ("rows",),
    ),
    Metric(
        "spindle_planned_step_tokens_total",
        _C,
        "Tokens that these steps emitted, by rows",
        ("rows",),
    ),
    Metric("spindle_planning_seconds", _H, "Time spent planning a step", (), _PLANNING_BUCKETS_S),
    Metric(
        "spindle_time_to_first_token_seconds",
        _H,
        "Time from a request's arrival to its first emission",
        ("arm",),
        _FIRST_TOKEN_BUCKETS_S,
    ),
    Metric(
        "spindle_inter_token_seconds",
        _H,
        "Time between two emissions of a request",
        ("arm",),
        _STEP_BUCKETS_S,
    ),
    Metric(
        "spindle_shadow_draft_length",
        _H,
        "Length that the planner would have chosen in shadow mode",
        ("draft",),
        _LENGTH_BUCKETS,
    ),
    Metric(
        "spindle_shadow_predicted_seconds_total",
        _C,
        "Predicted time of the steps that the planner would have chosen in shadow mode",
    ),
    Metric(
        "spindle_shadow_predicted_tokens_total",
        _C,
        "Tokens that the planner expected these steps to emit",
    ),
    Metric(
        "spindle_speculation_mode",
        _G,
        "Whether speculation is on, off or in shadow mode",
        ("mode",),
    ),
    Metric("spindle_canary_share", _G, "Share of requests that follow the planner"),
    Metric(
        "spindle_inter_token_cap_seconds", _G, "Longest step that the planner may choose; 0: no cap"
    ),
    Metric("spindle_active_requests", _G, "Requests in the in-flight batch"),
    Metric("spindle_queued_requests", _G, "Requests waiting for admission"),
    Metric(
        "spindle_kv_blocks",
        _G,
        "Blocks of 32 tokens in the KV cache: used, free, cached (free, but with a text's KV)",
        ("state",),
    ),
    Metric(
        "spindle_kv_block_events_total",
        _C,
        "Complete blocks of admitted requests that were reused or missed, and cached blocks that "
        "were evicted",
        ("event",),
    ),
    Metric(
        "spindle_kv_reused_tokens_total",
        _C,
        "Tokens whose KV the target already had when it admitted their request",
    ),
    Metric(
        "spindle_draft_holes_total",
        _C,
        "Requests without proposals from a draft that missed some of the target's states because "
        "it slept, failed, or was loaded later",
        ("draft",),
    ),
    Metric(
        "spindle_remembered_tokens_total",
        _C,
        "Tokens of answers that a draft remembered, and of old answers that it dropped for them",
        ("draft", "event"),
    ),
    Metric("spindle_engine_deaths_total", _C, "Times a TensorRT-LLM engine was lost", ("engine",)),
    Metric("spindle_engine_restarts_total", _C, "Restarts of the engine process"),
    Metric(
        "spindle_guard_ratio",
        _G,
        "Measured goodput of the plan over that of plain decoding, by requests in a step",
        ("rows",),
    ),
    Metric(
        "spindle_guard_level",
        _G,
        "Level that the guard applies, by requests in a step: 0 the plan, 2 no speculation",
        ("rows",),
    ),
    Metric(
        "spindle_guard_experiment_steps_total",
        _C,
        "Steps in which the guard tried another level, by that level",
        ("level",),
    ),
    Metric(
        "spindle_latency_drift",
        _G,
        "Measured time over predicted time, by part of the step; verifying: in addition to verify, "
        "of the decoding tokens in passes that verify any",
        ("part",),
    ),
)

_LENGTHS_OF_NVIDIA = (10, 50, 100, 500, 1000)
_SERIES = ("model", "version")

NVIDIA_FAMILIES: tuple[Metric, ...] = (
    Metric("nv_trt_llm_request_metrics", _G, "TRT LLM request metrics", ("request_type", *_SERIES)),
    Metric(
        "nv_trt_llm_runtime_memory_metrics",
        _G,
        "TRT LLM runtime memory metrics",
        ("memory_type", *_SERIES),
    ),
    Metric(
        "nv_trt_llm_kv_cache_block_metrics",
        _G,
        "TRT LLM KV cache block metrics",
        ("kv_cache_block_type", *_SERIES),
    ),
    Metric(
        "nv_trt_llm_disaggregated_serving_metrics",
        _C,
        "TRT LLM disaggregated serving metrics (always zero here)",
        ("disaggregated_serving_type", *_SERIES),
    ),
    Metric(
        "nv_trt_llm_inflight_batcher_metrics",
        _G,
        "TRT LLM inflight_batcher-specific metrics",
        ("inflight_batcher_specific_metric", *_SERIES),
    ),
    Metric("nv_trt_llm_general_metrics", _G, "General TRT LLM metrics", ("general_type", *_SERIES)),
    Metric(
        "nv_llm_output_token_len",
        _H,
        "Histogram of output token lengths",
        ("response_metric_type", *_SERIES),
        _LENGTHS_OF_NVIDIA,
    ),
    Metric(
        "nv_llm_input_token_len",
        _H,
        "Histogram of input token lengths",
        ("response_metric_type", *_SERIES),
        _LENGTHS_OF_NVIDIA,
    ),
)
"""Those of NVIDIA's models (``backend.ops.nvidia_metrics``), as they have them."""

FAMILIES: tuple[Metric, ...] = (*SPINDLE_FAMILIES, *NVIDIA_FAMILIES)
