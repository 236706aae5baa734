"""Arguments of vLLM's engine and settings of its planner, from ``serving.json``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.config import PolicyConfig, ServingConfig


def arguments(config: ServingConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's engine: the user's, and those that follow (``FOLLOWS``)."""
    limits = config.limits
    follow: dict[str, Any] = {
        "model": str(folder),
        "max_model_len": limits.max_context_tokens,
        "max_num_seqs": limits.max_active_requests,
        "enable_prefix_caching": limits.enable_kv_cache_reuse,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[config.target.dtype],
        "logprobs_mode": "processed_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
    }
    if "speculative_config" in config.target.engine_args:
        follow["per_request_spec_decode_metrics"] = "detailed"  # refused without a drafter
    return {"max_logprobs": 20, **config.target.engine_args, **follow}


def planner_settings(config: ServingConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the scheduler that plans lengths (``backend.hosts.settings``)."""
    defaults = asdict(PolicyConfig())
    policy = {
        name: value
        for name, value in asdict(config.policy).items()
        if name != "k_max" and value != defaults[name]
    }
    limits = {"max_active_requests": config.limits.max_active_requests}
    return {"policy": policy, "limits": limits, **overrides}
