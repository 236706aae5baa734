"""The TensorRT-LLM engines of a deployment before any of them is loaded: their folders, whether
they fit each other, GPUs and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import EngineConfig, ServingConfig
from backend.engines.port import Engine
from backend.engines.registry import Service
from backend.engines.trtllm.folder import (
    EngineFolder,
    check_draft,
    check_target,
    read_engine_folder,
    token_budget,
)
from backend.sequence import BLOCK_TOKENS
from backend.settings import ConfigError
from backend.storage.manifest import check_vocabulary

if TYPE_CHECKING:
    from backend.engines.trtllm.memory import KVPlan


TABLE_FILE = "latency.json"

MANAGES_KV = True

DRAFTS = ("trtllm", "lookup", "suffix")

_RESTARTED = "TensorRT-LLM's executor would restart it in every turn"
_NOT_REPORTED = "the TensorRT-LLM engine does not tell it turn by turn"

REFUSES = {
    "guide_type": _RESTARTED,
    "top_p_decay": _RESTARTED,
    "return_context_logits": _NOT_REPORTED,
    "return_generation_logits": _NOT_REPORTED,
    "return_prompt_log_probs": _NOT_REPORTED,
    "top_log_probs": _NOT_REPORTED,
    "resumed_tokens": _RESTARTED,
}


def trtllm_engines(config: ServingConfig) -> list[EngineConfig]:
    """Return the engines of a deployment that are TensorRT-LLM's, in the order in which they are
    created: the target first.
    """
    return [engine for engine in (config.target, *config.drafts) if engine.engine == "trtllm"]


def check_folder(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Check all engines of a deployment at once (``KindModule``), which must fit each other."""
    del key, engine
    check_engines(config, path)


def check_engines(
    config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> dict[str, EngineFolder]:
    """Read the folders and check them against each other and the settings. Raises ConfigError
    naming what does not fit.
    """
    folders = {engine.name: read_engine_folder(path(engine)) for engine in trtllm_engines(config)}
    if not folders:
        return folders
    for engine in trtllm_engines(config):
        if len(engine.gpus) != folders[engine.name].ranks:
            raise ConfigError(
                f"{engine.name}.gpus must name {folders[engine.name].ranks} GPUs, got "
                f"{list(engine.gpus)}"
            )
    target = folders.get(config.target.name)
    if target is None:
        raise ConfigError(
            f"drafts of the engine 'trtllm' need a target of it, got {config.target.engine!r}"
        )
    check_target(target, config.policy.k_max)
    for name, folder in folders.items():
        if name != config.target.name:
            check_draft(folder, target)
            check_vocabulary(target.folder, folder.folder)
    limits = config.limits
    if limits.max_active_requests > target.max_batch_size:
        raise ConfigError(
            f"limits.max_active_requests must be at most the target's max_batch_size "
            f"{target.max_batch_size}, "
            f"got {limits.max_active_requests}"
        )
    need = token_budget(1, limits.max_context_tokens, config.policy.k_max)
    for folder in folders.values():
        if folder.max_num_tokens < need:
            raise ConfigError(
                f"limits.max_context_tokens {limits.max_context_tokens} with policy.k_max "
                f"{config.policy.k_max} needs engines with a "
                f"max_num_tokens of at least {need}, got {folder.max_num_tokens} in {folder.folder}"
            )
    if limits.prefill_chunk_tokens < limits.max_context_tokens:
        raise ConfigError(
            f"limits.prefill_chunk_tokens must be at least max_context_tokens "
            f"{limits.max_context_tokens} with the engine "
            f"'trtllm', which runs a prompt in one iteration, got {limits.prefill_chunk_tokens}"
        )
    return folders


def make(engine: EngineConfig, service: Service) -> Engine:
    """Create an engine's executor, with its part of the memory. Raises ConfigError."""
    from backend.engines.trtllm.engine import ExecutorSettings, TrtllmEngine

    config = service.config
    folders = check_engines(config, service.path)
    plan = _kv_plan(tuple(trtllm_engines(config)), tuple(folders.values()))
    settings = ExecutorSettings(
        gpus=engine.gpus,
        kv_fraction=plan.fractions[engine.name],
        orchestrated=any(folder.ranks > 1 for folder in folders.values()),
        worker=engine.worker,
        turn_timeout_s=engine.turn_timeout_s,
    )
    context = config.limits.max_context_tokens
    usable = config.limits.max_active_requests * -(
        -(context + config.policy.k_max + 1) // BLOCK_TOKENS
    )  # more could never be filled
    return TrtllmEngine(
        engine.name,
        folders[engine.name],
        settings,
        max_context_tokens=context,
        kv_blocks=min(usable, plan.tokens // BLOCK_TOKENS),
        count=service.count,
    )


@lru_cache(maxsize=1)
def _kv_plan(engines: tuple[EngineConfig, ...], folders: tuple[EngineFolder, ...]) -> KVPlan:
    """Plan once for all engines, by the memory that is free before the first of them is created."""
    import torch

    from backend.engines.trtllm.memory import EngineMemory, plan_kv

    free = {gpu: int(torch.cuda.mem_get_info(gpu)[0]) for engine in engines for gpu in engine.gpus}
    memory = [
        EngineMemory(
            engine.name,
            engine.gpus,
            folder.weight_bytes + folder.ranks * folder.activation_bytes,
            folder.kv_bytes_per_token,
        )
        for engine, folder in zip(engines, folders, strict=True)
    ]
    return plan_kv(memory, free, min(engine.kv_share for engine in engines))
