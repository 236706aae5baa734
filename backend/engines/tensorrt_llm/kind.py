"""A deployment over TensorRT-LLM's LLM API before the library is imported: a checkpoint, which its
PyTorch flow runs, or an engine folder of ``trtllm-build``, which needs a version with the engine
backend (1.2.1 is the last stable one).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.tensorrt_llm.arguments import PLUG_IN, drafter
from backend.engines.tensorrt_llm.folder import is_engine_folder, read_engine_folder

if TYPE_CHECKING:
    from backend.engines.hosted import HostedService
    from backend.engines.tensorrt_llm.engine import LlmApiEngine

__all__ = ["REFUSES", "check_folder", "drafter", "start"]
_NOT_REPORTED = "not served with the engine 'tensorrt_llm'"
REFUSES = {
    "guide_type": "TensorRT-LLM 1.2.1 pins another llguidance than reads grammars here",
    "return_context_logits": _NOT_REPORTED,
    "return_generation_logits": _NOT_REPORTED,
    "return_prompt_log_probs": _NOT_REPORTED,
}


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Raise ConfigError for a folder that cannot be served, or with these settings
    (``KindModule``).
    """
    folder, limits = path(engine), config.limits
    spec = engine.engine_args.get("speculative_config")
    if is_engine_folder(folder):
        engine_folder = read_engine_folder(folder)
        if spec is not None:
            raise ConfigError(
                f"engine_args.speculative_config must be left out: {folder} is an engine folder, "
                f"to which the LLM API sends no drafts"
            )
        for name, setting, most in (
            ("max_active_requests", limits.max_active_requests, engine_folder.max_batch_size),
            ("max_context_tokens", limits.max_context_tokens, engine_folder.max_context_tokens),
        ):
            if setting > most:
                raise ConfigError(
                    f"limits.{name} must be at most {most}, as {folder} was built, got {setting}"
                )
        if engine_folder.verifies_drafts and not limits.enable_kv_cache_reuse:
            raise ConfigError(
                f"limits.enable_kv_cache_reuse must be true: {folder} was built with "
                f"--speculative_decoding_mode draft_tokens_external, which needs it"
            )
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} has neither a config.json nor a rank0.engine")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{key}: {folder} has no tokenizer.json")
    is_planned = config.policy.kind not in ("none", "fixed")
    if spec is not None and spec["decoding_type"] != PLUG_IN and is_planned:
        raise ConfigError(
            f"policy.kind must be 'none' or 'fixed' with speculative_config.decoding_type "
            f"{spec['decoding_type']!r}, whose lengths are TensorRT-LLM's to choose "
            f"(draft_len_schedule), got {config.policy.kind!r}"
        )


async def start(engine: EngineConfig, service: HostedService) -> LlmApiEngine:
    """Start the LLM (``HostedModule``)."""
    from backend.engines.tensorrt_llm.engine import start_engine

    return await start_engine(engine, service)
