"""NVIDIA's families on ``/metrics``: names and labels as in tensorrtllm_backend's
custom_metrics_reporter.cc (c2e65b8).
"""

import re
import time
import urllib.request

from backend.sequence import BLOCK_TOKENS

MODEL = {"model": "tensorrt_llm", "version": "1"}
SERIES = {
    "nv_trt_llm_request_metrics": (
        "request_type",
        {"active", "max", "scheduled", "context", "waiting"},
    ),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {"cpu", "gpu", "pinned"}),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {"max", "free", "used", "tokens_per", "reused", "fraction"},
    ),
    "nv_trt_llm_disaggregated_serving_metrics": (
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms", "request_count"},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
    ),
    "nv_trt_llm_general_metrics": ("general_type", {"timestamp", "iteration_counter"}),
    "nv_llm_output_token_len_count": ("response_metric_type", {"total_output_tokens"}),
    "nv_llm_input_token_len_count": ("response_metric_type", {"total_input_tokens"}),
}


def series(service):
    """Return {name: {(label, value), ...} sets} of what is exported."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{service.metrics}/metrics", timeout=10
    ) as response:
        lines = response.read().decode().splitlines()
    found = [re.fullmatch(r"(nv_(?:trt_)?llm_\w+)\{(.*)\} (\S+)", line) for line in lines]
    return [
        (match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(match[3]))
        for match in found
        if match
    ]


def test_every_family_has_its_series_with_nvidias_labels(service):
    service.generate("abc", 5)
    service.wait_until(lambda: service.metric("nv_llm_output_token_len_count") > 0, 5)
    exported = series(service)
    for name, (key, values) in SERIES.items():
        labels = [labels for family, labels, _ in exported if family == name]
        assert {labels[key] for labels in labels} == values, name
        assert all(labels == {key: labels[key], **MODEL} for labels in labels), name
    buckets = [
        labels["le"] for name, labels, _ in exported if name == "nv_llm_input_token_len_bucket"
    ]
    assert buckets == ["10", "50", "100", "500", "1000", "+Inf"]


def test_lengths_are_those_of_the_requests(service):
    before = settled(service)
    service.generate("0123456789", 33)
    service.wait_until(lambda: lengths(service) == (before[0] + 10, before[1] + 33), 5)


def lengths(service):
    return tuple(service.metric(f"nv_llm_{side}_token_len_sum") for side in ("input", "output"))


def settled(service):
    """Return the sums once nothing has come for two seconds: metrics are reported twice a second,
    those of earlier requests too.
    """
    seen, since = lengths(service), time.monotonic()
    while time.monotonic() < since + 2:
        time.sleep(0.1)
        if (now := lengths(service)) != seen:
            seen, since = now, time.monotonic()
    return seen


def test_the_gauges_follow_a_running_request_and_its_end(service):
    def requests(kind):
        return service.metric("nv_trt_llm_request_metrics", request_type=kind)

    def blocks(kind):
        return service.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)

    def generating():
        return service.metric(
            "nv_trt_llm_inflight_batcher_metrics",
            inflight_batcher_specific_metric="generation_requests",
        )

    steps = service.metric("nv_trt_llm_general_metrics", general_type="iteration_counter")
    body = b'{"text_input": "run ", "max_tokens": 1500, "stream": true, "end_id": -1}'
    with urllib.request.urlopen(
        f"http://127.0.0.1:{service.http}/v2/models/ensemble/generate_stream", body, timeout=10
    ) as stream:
        stream.readline()
        service.wait_until(
            lambda: (requests("active"), requests("scheduled"), generating()) == (1, 1, 1), 5
        )
        assert (requests("max"), requests("waiting"), requests("context")) == (64, 0, 0)
        assert 0 < blocks("used") < blocks("max") == blocks("used") + blocks("free")
        assert abs(blocks("fraction") - blocks("used") / blocks("max")) < 1e-6
        assert blocks("tokens_per") == BLOCK_TOKENS
    service.wait_until(lambda: (requests("active"), generating(), blocks("used")) == (0, 0, 0), 5)
    assert service.metric("nv_trt_llm_general_metrics", general_type="iteration_counter") > steps
    assert service.metric("nv_trt_llm_runtime_memory_metrics", memory_type="cpu") > 1e7


def test_reused_blocks_add_up(service):
    def reused():
        return service.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="reused")

    text, blocks = "the same beginning " * 9, 5
    assert blocks * BLOCK_TOKENS < len(text) <= (blocks + 1) * BLOCK_TOKENS
    service.generate(text, 4, cache_salt="reuse")
    before = reused()
    service.generate(text, 4, cache_salt="reuse")
    service.wait_until(lambda: reused() == before + blocks, 5)
