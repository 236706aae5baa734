"""vLLM's AsyncLLM as a hosted engine: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any

import vllm
from prometheus_client import REGISTRY
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from backend import lifeline
from backend.checked_settings import ConfigError
from backend.engines.hosted import HostedLimits, HostedRequest, HostedService, Meters, NewTokens
from backend.engines.port import EngineLostError
from backend.engines.vllm.arguments import arguments, planner_settings
from backend.engines.vllm.home import PlannerConnection
from backend.engines.vllm.metrics import Passing
from backend.engines.vllm.options import sampling_params
from backend.files import read_json
from backend.request import ErrorCode, RequestError
from backend.sequence import BLOCK_TOKENS
from backend.storage import cache

logger = logging.getLogger(__name__)

LEAST_VERSION = (0, 32)
"""Before it, vLLM's V2 model runner drafts all tokens whatever is planned, and does not report the
steps of a request.
"""
CALIBRATION_LIMIT_S = 900.0
"""The most seconds that the planner's measuring takes at start, with what vLLM compiles in it."""
METRICS_PERIOD_S = 2.0
"""Seconds between two passings of vLLM's own metrics, where steps have run since."""
_SCHEDULER = "backend.hosts.vllm_lengths.Spindle{}LengthScheduler"


def check_version(version: str = vllm.__version__) -> None:
    """Raise ConfigError for a vLLM that is too old."""
    numbers = version.partition("+")[0].split(".")[:2]
    if not all(number.isdecimal() for number in numbers):
        logger.warning("vLLM %s is of an unknown version", version)
    elif tuple(map(int, numbers)) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(
            f"vLLM {least} or newer is needed, found {version}: older ones draft all tokens on "
            f"GPUs, whatever is planned"
        )


async def start_vllm(name: str, service: HostedService) -> VllmEngine:
    """Start vLLM, and wait until its planner has measured it, if there is one."""
    check_version()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # threads run here
    lifeline.end_group()
    folder = service.path(service.config.target)
    engine_args = arguments(service.config, folder)
    if current_platform.is_cpu():
        engine_args = {**_cpu_memory(service, read_json(folder / "config.json")), **engine_args}
    home = PlannerConnection(service) if "speculative_config" in engine_args else None
    if home is not None:
        engine_args |= {"additional_config": _planner_config(service, engine_args, home.path)}
    config = _engine_config(engine_args)
    if home is not None:
        scheduling = "Async" if config.scheduler_config.async_scheduling else ""
        config.scheduler_config.scheduler_cls = _SCHEDULER.format(scheduling)
    engine = VllmEngine(name, config, service, home)
    if home is not None:
        await engine.wait_for_plans(home)
    return engine


def _engine_config(engine_args: dict[str, Any]) -> Any:
    """Return vLLM's configuration. Raises ConfigError with vLLM's reasons for refusing it."""
    try:
        return AsyncEngineArgs(**engine_args).create_engine_config()
    except ValidationError as error:
        reasons = "; ".join(
            ": ".join([*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")])
            for one in error.errors()
        )
    except (TypeError, ValueError) as error:
        reasons = str(error)
    raise ConfigError(f"vLLM refuses target.engine_args: {reasons}")


def _planner_config(
    service: HostedService, engine_args: dict[str, Any], home: str
) -> dict[str, Any]:
    """Return ``additional_config`` with the settings of the planner: measured latencies are kept in
    the cache.
    """
    additional = engine_args.get("additional_config", {})
    depends = json.dumps(
        [engine_args, vllm.__version__, os.cpu_count()], sort_keys=True, default=str
    )
    key = hashlib.sha256(depends.encode()).hexdigest()
    file = cache.table_file(f"vllm-{key}")
    file.parent.mkdir(parents=True, exist_ok=True)
    options = {"latency_file": str(file), **additional.get("spindle", {}), "home": home}
    settings = planner_settings(service.config, {**options, "learned_key": key})
    return {**additional, "spindle": settings}


def _cpu_memory(service: HostedService, model: dict[str, Any]) -> dict[str, Any]:
    """Return the memory that KV gets on a CPU, where vLLM would take nine tenths of all: that of
    ``limits.kv_cache_tokens``.
    """
    text = model.get("text_config") or model
    heads = text.get("num_attention_heads") or 1
    size = text.get("head_dim") or (text.get("hidden_size") or heads) // heads
    kv_heads = text.get("num_key_value_heads") or heads
    token_bytes = 2 * (text.get("num_hidden_layers") or 1) * kv_heads * size * 4  # of fp32
    least = service.config.limits.max_context_tokens
    return {
        "kv_cache_memory_bytes": token_bytes * max(service.config.limits.kv_cache_tokens, least)
    }


class _Steps(StatLoggerBase):  # type: ignore[misc] # vLLM is not there to be checked
    """Takes vLLM's figures of each step. ``spindle_*`` are counted here unless a planner does."""

    def __init__(self, meters: Meters, *, counts: bool) -> None:
        self.stepped_s = 0.0
        self.kv_usage = 0.0
        self._meters, self._counts = meters, counts

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Note that a step is over."""
        del mm_cache_stats, engine_idx
        self.stepped_s = monotonic()
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
        if self._counts and iteration_stats is not None:
            emitted = iteration_stats.num_generation_tokens
            self._meters.count("spindle_steps_total")
            self._meters.count("spindle_emitted_tokens_total", emitted, draft="none", arm="planner")

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VllmEngine:
    """One AsyncLLM; its scheduler and its workers are processes of their own."""

    def __init__(
        self, name: str, config: Any, service: HostedService, home: PlannerConnection | None
    ) -> None:
        self.name = name
        self._home = home
        self._steps = _Steps(service.meters, counts=home is None)
        self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: self._steps])
        config = self._llm.vllm_config
        speculation, kv, model = config.speculative_config, config.cache_config, config.model_config
        self._eos = self._llm.renderer.get_tokenizer().eos_token_id
        self.limits = HostedLimits(
            vocab_size=model.get_vocab_size(),
            max_context_tokens=model.max_model_len,
            kv_tokens=(kv.num_gpu_blocks or 0) * kv.block_size,
            draft="" if speculation is None else str(speculation.method),
            k_max=0 if speculation is None else speculation.num_speculative_tokens,
        )

        self._passing = asyncio.create_task(self._pass_metrics(service.meters))

    async def _pass_metrics(self, meters: Meters) -> None:
        passing, passed_s = Passing(meters), -1.0
        while True:
            if passed_s != self._steps.stepped_s:
                passed_s = self._steps.stepped_s
                passing.update(REGISTRY.collect())
            await asyncio.sleep(METRICS_PERIOD_S)

    async def wait_for_plans(self, home: PlannerConnection) -> None:
        """Wait until the planner has measured what steps take. Raises ConfigError where it does not
        end.
        """
        events = asyncio.get_running_loop()
        if not await events.run_in_executor(None, home.wait_for_plans, CALIBRATION_LIMIT_S):
            raise ConfigError(f"vLLM was not measured within {CALIBRATION_LIMIT_S:g} s")

    async def generate(self, ask: HostedRequest) -> AsyncGenerator[NewTokens, None]:
        """Yield a generation's parts (``HostedEngine``)."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
        if ask.salt:
            prompt["cache_salt"] = ask.salt
        params = sampling_params(ask, speculates=bool(self.limits.draft), eos=self._eos)
        try:
            outputs = self._llm.generate(
                prompt, params, f"spindle-{ask.id}", trace_headers=ask.trace
            )
            try:
                async for output in outputs:
                    yield _part(output, ask)
            finally:
                await outputs.aclose()
        except EngineDeadError as error:
            raise EngineLostError(str(error)) from error
        except VLLMClientError as error:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"vLLM refuses it: {error}") from error

    def stepped_s(self) -> float:
        """Return when a step last ended."""
        return self._steps.stepped_s

    def usage(self) -> dict[str, int]:
        """Return KV blocks by state, in our blocks."""
        blocks = self.limits.kv_tokens // BLOCK_TOKENS
        blocks_used = round(blocks * self._steps.kv_usage)
        return {"used": blocks_used, "free": blocks - blocks_used}

    def explain(self) -> dict[str, Any]:
        """Return the planner's explanation of its last plan."""
        if self._home is None:
            return {"age_s": None, "step": "vLLM has no drafter here", "requests": []}
        return self._home.ask("explain")

    def learned_state(self) -> dict[str, Any]:
        """Return what the planner has learned."""
        return {} if self._home is None else self._home.ask("learned")

    async def close(self) -> None:
        """End vLLM's processes."""
        self._passing.cancel()
        self._llm.shutdown()
        if self._home is not None:
            self._home.close()


def _part(output: Any, ask: HostedRequest) -> NewTokens:
    (one,) = output.outputs
    part = NewTokens(list(one.token_ids), cached_tokens=output.num_cached_tokens or 0)
    if one.logprobs is not None:
        pairs = zip(one.logprobs, part.tokens, strict=True)
        part.log_probs = [row[token].logprob for row, token in pairs]
        most = ask.sampling.top_log_probs or 0
        part.top = [_likeliest(row, most) for row in one.logprobs]
    metrics = one.spec_decode_metrics
    if metrics is not None and metrics.per_step_drafted:
        steps = zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True)
        part.verified_steps = [step for step in steps if step[0]]
    return part


def _likeliest(row: dict[int, Any], most: int) -> list[tuple[int, float]]:
    pairs = [(token, scored.logprob) for token, scored in row.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:most]
