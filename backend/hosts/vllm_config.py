"""Reads the vLLM plug-in's settings from vLLM's configuration, and the file of its latencies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm

from backend.checked_settings import ConfigError
from backend.hosts.settings import HostConfig, host_config

logger = logging.getLogger(__name__)

SETTINGS = "spindle"


def settings_of(vllm_config: Any, drafter: str = "", *, asynchronous: bool = False) -> HostConfig:
    """Return the plug-in's settings, for a ``drafter`` of vLLM's own if it has a name. Raises
    ConfigError for what it cannot do.
    """
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("Spindle's schedulers do not run with pipeline parallelism")
    if bool(vllm_config.scheduler_config.async_scheduling) != asynchronous:
        raise ConfigError(
            "async_scheduling must be on with SpindleAsyncLengthScheduler (CPUs do not have it)"
            if asynchronous
            else "async_scheduling must be off with this scheduler; SpindleAsyncLengthScheduler "
            "has it on, with a drafter of vLLM's own"
        )
    raw = (vllm_config.additional_config or {}).get(SETTINGS, {})
    length = vllm_config.model_config.max_model_len
    return host_config(raw, speculation.num_speculative_tokens, length, drafter)


def warn_of_v1(vllm_config: Any) -> None:
    """Warn where the settings have moved vLLM to its older model runner."""
    is_cpu = str(vllm_config.device_config.device_type) == "cpu"
    if is_cpu or getattr(vllm_config, "use_v2_model_runner", False):
        return
    logger.warning(
        "spindle: vLLM runs its V1 model runner with speculative method %r; newer versions call it "
        "deprecated. Their V2 runner needs a method of vLLM's own: SpindleAsyncLengthScheduler",
        vllm_config.speculative_config.method,
    )


def draws_right(vllm_config: Any) -> bool:
    """Return whether vLLM's rule of acceptance keeps the distribution of sampled requests.

    On CPUs vLLM (0.24.0 to 0.32.0) loses their temperature where anything is proposed in a step:
    what spreads it over the rows writes into a copy (its own n-grams are as wrong).
    """
    if str(vllm_config.device_config.device_type) != "cpu":
        return True
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    spread, ends = torch.zeros(3), torch.tensor([1, 3])
    cpu_triton_utils._expand_kernel_impl(spread, torch.tensor([0.25, 0.5]), ends, 0, 1)
    right = bool(spread.tolist() == [0.25, 0.5, 0.5])
    if not right:
        logger.warning(
            "spindle: no proposals for sampled requests, because vLLM draws them wrongly"
        )
    return right


def read_latencies(file: str) -> dict[str, Any] | None:
    """Return what is in a latency file, None where there is none."""
    if not file or not Path(file).exists():
        return None
    saved: dict[str, Any] = json.loads(Path(file).read_text("utf-8"))
    return saved


def save_latencies(file: str, measured: dict[str, Any]) -> None:
    """Write what was measured into a latency file, if there is to be one."""
    if file:
        Path(file).write_text(json.dumps(measured, indent=1) + "\n", "utf-8")


def provenance(vllm_config: Any) -> Iterator[str]:
    """Yield device, model, dtype and version of what was measured."""
    yield str(vllm_config.device_config.device_type)
    yield Path(str(vllm_config.model_config.model)).name
    yield str(vllm_config.model_config.dtype)
    yield f"vllm {vllm.__version__}"
