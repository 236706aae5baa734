"""The composition root: the only place that knows which engine, policy and tokenizer a
configuration means.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, cast

import policy
from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.core.admission import Admission
from backend.core.hosted import HostedLoop
from backend.core.kv_ledger import KVLedger
from backend.core.loop import Loop
from backend.core.orchestrator import Orchestrator
from backend.core.preparation import Preparation
from backend.core.session import ReplySink, Session
from backend.engine_config import EMBEDDED_MODEL, slower_on_cpus, unused_gpus
from backend.engines.hosted import HostedModule, HostedService
from backend.engines.port import Engine, Prepares
from backend.engines.registry import Service, make_engine, module_of
from backend.kinds import KINDS, automatic
from backend.model_folders import (
    check_folders,
    check_memory,
    check_pairs,
    model_path,
    with_kv,
)
from backend.ops.stats import Stats, StepStats
from backend.ops.switches import SwitchBoard
from backend.ops.tracing import Tracing
from backend.request import GenerationRequest
from backend.sampling.guides import Grammars
from backend.sampling.reading import GrammarProcess
from backend.speculation.drafting import Drafting
from backend.speculation.explaining import explain_last
from backend.speculation.learned_state import LearnedState, learned_key
from backend.speculation.policy_factory import check_policy, compile_planner, make_policy
from backend.storage import cache
from backend.storage.tables import load_tables, timed_engines
from backend.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from policy import LatencyTable

logger = logging.getLogger(__name__)


class LearnedStore(Protocol):
    """Keeps what the policy learns over restarts, and shows it."""

    def show(self) -> dict[str, Any]:
        """Return the learned state (any thread)."""
        ...

    def restore(self) -> None:
        """Restore what an earlier process saved, before the loop runs."""
        ...

    def start(self) -> None:
        """Start to save."""
        ...

    def close(self) -> None:
        """Save once more."""
        ...


@dataclass(slots=True)
class App:
    """A wired deployment: the loop, and how a request becomes one of its sessions."""

    config: ServingConfig
    loop: Loop
    engines: list[Engine]
    """The target and the drafts that run, in order; none where the target is hosted."""
    taps: tuple[int, ...]
    """The layers, counted from 1, whose states the target gives drafts as long as it runs."""
    tokenizer: Tokenizer
    stats: Stats
    step_stats: StepStats
    switches: SwitchBoard
    learned_state: LearnedStore
    explain: Callable[[], dict[str, Any]]
    """Returns the reply to the command ``explain`` (any thread)."""
    tracing: Tracing
    max_context_tokens: int
    close: Callable[[], None]
    preparation: Preparation

    @property
    def orchestrator(self) -> Orchestrator:
        """The loop over step engines. Raises ConfigError where the target is hosted."""
        if not isinstance(self.loop, Orchestrator):
            raise ConfigError(f"the engine {self.config.target.engine!r} has a loop of its own")
        return self.loop

    @property
    def target(self) -> Engine:
        """The target's engine, where it is not hosted."""
        return self.engines[0]

    @property
    def drafts(self) -> list[Engine]:
        """The drafts that run, in order."""
        return self.engines[1:]

    def session(self, request: GenerationRequest, sink: ReplySink) -> Session:
        """Return the session of a request. Raises RequestError naming the field and the value."""
        return self.preparation.session(request, sink)


def build(config: ServingConfig, tables: Mapping[str, LatencyTable] | None = None) -> App:
    """Load the engines and wire the loop. ``tables`` (and then one thread) stand in for those
    measured on this machine.

    Raises ConfigError, LatencyError (a table is missing) or the engine's own error when something
    does not fit.
    """
    _check_imports()
    check_policy(config)
    tokenizer = _tokenizer(config)
    if config.target.kind.hosted:
        return _build_hosted(config, tokenizer)
    tables, threads = _read_times(config) if tables is None else (tables, 1)
    config = with_kv(config)
    check_memory(config)
    stats = Stats()
    service = Service(config, threads, model_path, stats.count)
    engines = [make_engine(engine, service) for engine in config.engines]
    target, *drafts = engines
    for engine in engines:
        if isinstance(engine, Prepares):
            engine.prepare(drafts, config.limits.max_active_requests)
    step_stats = StepStats(stats, config.limits.max_active_requests, cpu_only=_cpu_only(config))
    _report_slow_kernels(config, step_stats)
    compile_planner(logger.info, step_stats)
    switches = SwitchBoard(config, step_stats)
    planner = policy.SwitchedPolicy(
        make_policy(config, drafts, tables, step_stats), switches.current
    )
    orchestrator = _loop(config, target, drafts, planner, step_stats)
    key = learned_key(config, _timed_folders(config))
    learned = LearnedState(
        planner, orchestrator.cycle.runner, step_stats, key, keep=config.policy.keep_learned
    )

    def close_engines() -> None:
        for engine in engines:
            engine.close()

    return _app(
        config,
        tokenizer,
        step_stats,
        loop=orchestrator,
        vocab_size=target.limits.vocab_size,
        max_context_tokens=target.limits.max_context_tokens,
        stats=stats,
        switches=switches,
        engines=engines,
        taps=service.taps,
        learned_state=learned,
        explain=partial(explain_last, orchestrator.cycle),
        close_engines=close_engines,
    )


class _HostedLearnedStore:
    """Shows what the planner has learned that runs in a hosted engine, which keeps it there."""

    def __init__(self, show: Callable[[], dict[str, Any]]) -> None:
        self.show = show

    def restore(self) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _build_hosted(config: ServingConfig, tokenizer: Tokenizer) -> App:
    """Start an engine with a loop of its own, and wire the rest around it."""
    check_folders(config)
    module = cast(HostedModule, module_of(config.target))
    limits, stats = config.limits, Stats()
    step_stats = StepStats(stats, limits.max_active_requests, cpu_only=False)
    switches = SwitchBoard(config, step_stats)
    service = HostedService(config, model_path, stats, switches.current)
    loop = HostedLoop(
        lambda: module.start(config.target, service),
        step_stats,
        monotonic,
        max_active=limits.max_active_requests,
        max_queued=limits.max_queued_requests,
        max_request_s=limits.max_request_s,
    )
    sizes = loop.engine.limits
    kv_tokens = sizes.kv_tokens or limits.kv_cache_tokens
    return _app(
        replace(config, limits=replace(limits, kv_cache_tokens=kv_tokens)),
        tokenizer,
        step_stats,
        loop=loop,
        vocab_size=sizes.vocab_size,
        max_context_tokens=sizes.max_context_tokens,
        stats=stats,
        switches=switches,
        engines=[],
        taps=(),
        learned_state=_HostedLearnedStore(loop.engine.learned_state),
        explain=loop.engine.explain,
        close_engines=loop.close,
    )


def _app(
    config: ServingConfig,
    tokenizer: Tokenizer,
    step_stats: StepStats,
    *,
    vocab_size: int,
    max_context_tokens: int,
    close_engines: Callable[[], None],
    **parts: Any,
) -> App:
    """Return a deployment of these parts, and of those that every one has."""
    tracing, reader = Tracing(step_stats), GrammarProcess(vocab_size)
    switches: SwitchBoard = parts["switches"]

    def close() -> None:
        tracing.close()
        reader.close()
        close_engines()

    max_context = min(config.limits.max_context_tokens, max_context_tokens)
    preparation = Preparation(
        config,
        tokenizer,
        vocab_size,
        max_context,
        lambda request: switches.current().in_control(request),
        Grammars(tokenizer, vocab_size, reader.read),
    )
    return App(
        config=config,
        tokenizer=tokenizer,
        step_stats=step_stats,
        tracing=tracing,
        max_context_tokens=max_context,
        close=close,
        preparation=preparation,
        **parts,
    )


def _check_imports() -> None:
    if Path(policy.__file__).resolve().parent.parent != PROJECT_ROOT:
        raise ConfigError(
            f"policy was imported from {policy.__file__}, backend from {PROJECT_ROOT}: one of "
            f"them is another project's"
        )


def _report_slow_kernels(config: ServingConfig, stats: StepStats) -> None:
    """Log and count engines that run without the kernels that are made for their device."""
    engines = config.engines
    devices = {engine.name: f"{engine.engine} on {engine.device}" for engine in engines}
    for name, reason in unused_gpus(config.engines).items():
        best = automatic("cuda")[0]
        logger.warning("%s: %s, not %s on a GPU: %s", name, devices[name], best, reason)
        if not devices[name].endswith(" cpu"):
            stats.fallback("cuda_engine_unused")
    best = automatic("cpu")[0]
    for name, reason in slower_on_cpus(config.engines).items():
        logger.warning("%s: %s, slower than %s: %s", name, devices[name], best, reason)
        stats.fallback("openvino_missing" if KINDS[best].missing else "openvino_unused")


def _timed_folders(config: ServingConfig) -> dict[str, Path]:
    return {engine.name: model_path(engine) for engine in timed_engines(config)}


def _read_times(config: ServingConfig) -> tuple[Mapping[str, LatencyTable], int]:
    """Return the tables measured on this machine, and the threads that they are of."""
    return load_tables(config, _timed_folders(config))


def _cpu_only(config: ServingConfig) -> bool:
    return all(engine.device == "cpu" for engine in config.engines)


def _loop(
    config: ServingConfig,
    target: Engine,
    drafts: list[Engine],
    planner: policy.AnyPolicy,
    stats: StepStats,
) -> Orchestrator:
    """Return the loop over these engines, with its KV ledger, admission and drafting."""
    limits, k_max = config.limits, config.policy.k_max
    ledger = KVLedger(
        {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)},
        headroom_tokens=(k_max + 1) * (1 + target.limits.lookahead),
        guaranteed=limits.batch_scheduler_policy == "guaranteed_no_evict",
        target=target if limits.enable_kv_cache_reuse else None,
    )
    if limits.enable_kv_cache_reuse and (endpoint := os.environ.get("KV_EVENTS")):
        from backend.ops.kv_events import KVEvents

        ledger.observe(KVEvents(endpoint))
    admission = Admission(
        ledger, limits.max_active_requests, limits.max_queued_requests, limits.max_logits_bytes
    )
    most_nodes = k_max if target.limits.tree else 0
    return Orchestrator(
        target,
        Drafting(
            drafts,
            stats,
            monotonic,
            most_nodes=most_nodes,
            vocab_size=target.limits.vocab_size,
        ),
        planner,
        ledger,
        admission,
        stats,
        monotonic,
        k_max=k_max,
        prefill_chunk_tokens=limits.prefill_chunk_tokens,
        max_request_s=limits.max_request_s,
        seed=config.policy.seed,
    )


def _tokenizer(config: ServingConfig) -> Tokenizer:
    if not config.target.kind.tokenizer:
        return ByteTokenizer()
    if config.target.model == EMBEDDED_MODEL:
        cache.check(model_path(config.target))
    check_pairs(config)
    return load_tokenizer(model_path(config.target))
