"""One view of the counters of vLLM, SGLang and TensorRT-LLM: what two pages of /metrics differ in.

vLLM 0.32 counts everything; TensorRT-LLM 1.3 counts acceptance by position; SGLang 0.5 shows gauges
of means, and its ``inter_token_latency_seconds`` is divided by tokens, so it is no step's time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.advise import AdviceError

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNTERS = {
    "steps": ("vllm:iteration_tokens_total_count",),
    "generated": (
        "vllm:generation_tokens",
        "sglang:generation_tokens",
        "trtllm_generation_tokens",
    ),
    "prompt": ("vllm:prompt_tokens", "sglang:prompt_tokens", "trtllm_prompt_tokens"),
    "cached": (
        "vllm:prompt_tokens_cached",
        "sglang:cached_tokens",
        "trtllm_prompt_cached_tokens",
    ),
    "row_steps": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    ),
    "row_step_s": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
    ),
    "firsts": (
        "vllm:time_to_first_token_seconds_count",
        "sglang:time_to_first_token_seconds_count",
        "trtllm_time_to_first_token_seconds_count",
    ),
    "drafts": ("vllm:spec_decode_num_drafts",),
    "drafted": (
        "vllm:spec_decode_num_draft_tokens",
        "trtllm_spec_decode_num_draft_tokens",
    ),
    "accepted": (
        "vllm:spec_decode_num_accepted_tokens",
        "trtllm_spec_decode_num_accepted_tokens",
    ),
    "preempted": ("vllm:num_preemptions",),
}
"""The first name that a server has counts; a ``_total`` at the end is left out."""
GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
_ACCEPTED_AT = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": "position",
    "trtllm_spec_decode_accepted_tokens": "token_position",
}
_DRAFTED_AT = {"trtllm_spec_decode_drafted_tokens": "token_position"}
ENGINES = {"vllm:": "vllm", "sglang:": "sglang", "trtllm_": "tensorrt_llm"}


@dataclass(frozen=True)
class Scrape:
    """A page of counters; what the server does not count is missing from ``values``."""

    at_s: float
    values: Mapping[str, float]
    gauges: Mapping[str, float] = field(default_factory=dict)
    accepted: tuple[float, ...] = ()
    """Accepted tokens by position."""
    engine: str = ""
    cpu_s: float = 0.0


def parse(text: str, at_s: float, cpu_s: float = 0.0) -> Scrape:
    """Read a page of Prometheus's text format, summed over engines and ranks."""
    sums: dict[str, float] = {}
    at: dict[str, dict[int, float]] = {"accepted": {}, "drafted": {}}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.match(line)):
            continue
        name, labels = match[1].removesuffix("_total"), dict(_LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        sums[name] = sums.get(name, 0.0) + value
        for key, label in (
            ("accepted", _ACCEPTED_AT.get(name)),
            ("drafted", _DRAFTED_AT.get(name)),
        ):
            if label and labels.get(label, "").isdigit():
                place = int(labels[label])
                at[key][place] = at[key].get(place, 0.0) + value
    values = _first(sums, COUNTERS)
    if at["drafted"]:  # TensorRT-LLM counts no drafts: each has a first token
        values.setdefault("drafts", max(at["drafted"].values()))
        values.setdefault("drafted", sum(at["drafted"].values()))
    places = sorted(at["accepted"])
    accepted = tuple(at["accepted"][place] for place in places)
    if places:
        values.setdefault("accepted", sum(accepted))
    engines = [e for prefix, e in ENGINES.items() if any(n.startswith(prefix) for n in sums)]
    engine = engines[0] if engines else ""
    return Scrape(at_s, values, _first(sums, GAUGES), accepted, engine, cpu_s)


def _first(sums: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    present = {key: [sums[n] for n in each if n in sums] for key, each in names.items()}
    return {key: values[0] for key, values in present.items() if values}


@dataclass(frozen=True)
class Window:
    """The difference of two pages."""

    wall_s: float
    delta: Mapping[str, float]
    accepted: tuple[float, ...] = ()
    cpu_s: float = 0.0

    @classmethod
    def between(cls, first: Scrape, last: Scrape) -> Window:
        """Subtract two pages. Raises AdviceError if a counter fell: the server was restarted."""
        delta = {k: v - first.values.get(k, 0.0) for k, v in last.values.items()}
        before = first.accepted + (0.0,) * (len(last.accepted) - len(first.accepted))
        accepted = tuple(b - a for a, b in zip(before, last.accepted, strict=False))
        fell = [key for key, value in delta.items() if value < 0]
        fell += [key for key in first.values if key not in last.values]
        if fell or min(accepted, default=0) < 0:
            name = (fell or ["accepted"])[0]
            raise AdviceError(
                f"the counter {COUNTERS[name][0]} fell between two readings: the server was "
                "restarted meanwhile. Measure again when it stays up."
            )
        return cls(last.at_s - first.at_s, delta, accepted, last.cpu_s - first.cpu_s)

    def __getitem__(self, name: str) -> float:
        return self.delta.get(name, 0.0)


def require(page: Scrape, *names: str) -> None:
    """Raise AdviceError if a server lacks one of these counters, with what to do about it."""
    for name in names:
        if name in page.values:
            continue
        if name in ("drafts", "drafted", "accepted"):
            wanted = "vllm:spec_decode_*"
            cure = "start it with --speculative-config, or use --serve"
        else:
            wanted = COUNTERS[name][0]
            cure = "start it without --disable-log-stats (vLLM) or with --enable-metrics (SGLang)"
        raise AdviceError(f"the server's /metrics has no {wanted}: {cure}")
