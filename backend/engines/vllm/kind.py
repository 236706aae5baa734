"""vLLM's deployments before vLLM is imported: their folder, and vLLM's own arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.hosted import HostedEngine, HostedService
from backend.engines.vllm import contract

REFUSES = contract.REFUSES
ENVIRONMENT = ".venv-vllm"
"""The folder of its interpreter, in a clone (``make vllm``)."""

FOLLOWS = {
    "model": "target.model",
    "tokenizer": "target.model",
    "max_model_len": "limits.max_context_tokens",
    "max_num_seqs": "limits.max_active_requests",
    "enable_prefix_caching": "limits.enable_kv_cache_reuse",
    "dtype": "target.dtype",
    "scheduler_cls": "policy",
    "logprobs_mode": "return_log_probs, which has one meaning",
    "structured_outputs_config": "guided_decoding_guide_type",
    "per_request_spec_decode_metrics": "return_perf_metrics",
    "disable_log_stats": "the metrics",
}
"""Arguments of vLLM that follow from serving.json or from the contract, and from what."""


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder without a config.json or a tokenizer."""
    del config
    folder = path(engine)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{key}: {folder} has no {name}")


def drafter(engine: EngineConfig) -> tuple[str, int]:
    """Return vLLM's drafter (``HostedModule``)."""
    arguments = engine.engine_args
    for name in arguments:
        if name in FOLLOWS:
            raise ConfigError(
                f"target.engine_args.{name} must be left out: it follows from {FOLLOWS[name]}"
            )
    where, speculation = "target.engine_args.speculative_config", arguments.get(_SPECULATIVE)
    if speculation is None:
        return "", 0
    if not isinstance(speculation, dict):
        raise ConfigError(f"{where} must be an object, got {speculation!r}")
    method, length = speculation.get("method"), speculation.get("num_speculative_tokens")
    if not isinstance(method, str) or method == "custom_class":
        raise ConfigError(f"{where}.method must name a drafter of vLLM's own, got {method!r}")
    if type(length) is not int or length < 1:
        raise ConfigError(f"{where}.num_speculative_tokens must be at least 1, got {length!r}")
    return method, length


_SPECULATIVE = "speculative_config"


async def start(engine: EngineConfig, service: HostedService) -> HostedEngine:
    """Start vLLM (``HostedModule``)."""
    from backend.engines.vllm.engine import start_vllm

    return await start_vllm(engine.name, service)
