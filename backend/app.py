"""The composition root: the only place that knows which engine, policy and tokenizer a
configuration means.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import policy
from backend.config import EMBEDDED_MODEL, PROJECT_ROOT, ServingConfig, slower_on_cpus, unused_gpus
from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.preparation import Preparation
from backend.core.session import ReplySink, Session
from backend.engines.port import Engine, Prepares
from backend.engines.registry import Service, make_engine
from backend.kinds import KINDS, automatic
from backend.model_folders import check_memory, check_pairs, model_path, with_kv
from backend.ops.stats import Stats, StepStats
from backend.ops.switches import SwitchBoard
from backend.ops.tracing import Tracing
from backend.request import GenerationRequest
from backend.sampling.guides import Grammars
from backend.sampling.reading import GrammarProcess
from backend.settings import ConfigError
from backend.speculation.drafting import Drafting
from backend.speculation.learned_state import LearnedState, learned_key
from backend.speculation.policy_factory import check_policy, compile_planner, make_policy
from backend.storage import cache
from backend.storage.tables import load_tables, shipped_tables, timed_engines
from backend.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from policy import LatencyTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class App:
    """A wired deployment: the loop, and how a request becomes one of its sessions. ``drafts`` are
    the engines that run, in order; ``taps`` the layers, counted from 1, whose states the target
    tells them as long as it runs.
    """

    config: ServingConfig
    orchestrator: Orchestrator
    target: Engine
    drafts: list[Engine]
    taps: tuple[int, ...]
    tokenizer: Tokenizer
    stats: Stats
    step_stats: StepStats
    switches: SwitchBoard
    learned: LearnedState
    tracing: Tracing
    max_context_tokens: int
    close: Callable[[], None]
    preparation: Preparation

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
    tables, threads = _measured(config) if tables is None else (tables, 1)
    config = with_kv(config)
    check_memory(config)
    stats = Stats()
    service = Service(config, threads, model_path, stats.count)
    target = make_engine(config.target, service)
    drafts = [make_engine(draft, service) for draft in config.drafts]
    for engine in (target, *drafts):
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
    tracing = Tracing(step_stats)
    key = learned_key(config, _timed_folders(config))
    learned = LearnedState(
        planner, orchestrator.cycle.runner, step_stats, key, keep=config.policy.keep_learned
    )

    reader = GrammarProcess(target.limits.vocab_size)

    def close() -> None:
        tracing.close()
        reader.close()
        for engine in (target, *drafts):
            engine.close()

    max_context = min(config.limits.max_context_tokens, target.limits.max_context_tokens)
    preparation = Preparation(
        config,
        tokenizer,
        target.limits.vocab_size,
        max_context,
        lambda request: switches.current().in_control(request),
        Grammars(tokenizer, target.limits.vocab_size, reader.read),
    )
    return App(
        config=config,
        orchestrator=orchestrator,
        target=target,
        drafts=drafts,
        taps=service.taps,
        tokenizer=tokenizer,
        stats=stats,
        step_stats=step_stats,
        switches=switches,
        learned=learned,
        tracing=tracing,
        max_context_tokens=max_context,
        close=close,
        preparation=preparation,
    )


def _check_imports() -> None:
    if Path(policy.__file__).resolve().parent.parent != PROJECT_ROOT:
        raise ConfigError(
            f"policy was imported from {policy.__file__}, backend from {PROJECT_ROOT}: one of "
            f"them is another project's"
        )


def _report_slow_kernels(config: ServingConfig, stats: StepStats) -> None:
    """Log and count engines that run without the kernels that are made for their device."""
    engines = (config.target, *config.drafts)
    devices = {engine.name: f"{engine.engine} on {engine.device}" for engine in engines}
    for name, reason in unused_gpus(config).items():
        best = automatic("cuda")[0]
        logger.warning("%s: %s, not %s on a GPU: %s", name, devices[name], best, reason)
        if not devices[name].endswith(" cpu"):
            stats.fallback("cuda_engine_unused")
    best = automatic("cpu")[0]
    for name, reason in slower_on_cpus(config).items():
        logger.warning("%s: %s, slower than %s: %s", name, devices[name], best, reason)
        stats.fallback("openvino_missing" if KINDS[best].missing else "openvino_unused")


def _timed_folders(config: ServingConfig) -> dict[str, Path]:
    return {engine.name: model_path(engine) for engine in timed_engines(config)}


def _measured(config: ServingConfig) -> tuple[Mapping[str, LatencyTable], int]:
    """Return the tables measured on this machine, and the threads that they are of."""
    tables, threads = load_tables(config, _timed_folders(config))
    return {**tables, **shipped_tables(config, model_path)}, threads


def _cpu_only(config: ServingConfig) -> bool:
    return all(
        not engine.kind.answer("MANAGES_KV", False) and engine.device == "cpu"
        for engine in (config.target, *config.drafts)
    )


def _loop(
    config: ServingConfig,
    target: Engine,
    drafts: list[Engine],
    planner: policy.AnyPolicy,
    stats: StepStats,
) -> Orchestrator:
    """Return the loop over these engines, with its KV ledger, admission and drafting."""
    limits, k_max = config.limits, config.policy.k_max
    shares_kv = limits.enable_kv_cache_reuse and not config.target.kind.answer("MANAGES_KV", False)
    ledger = KVLedger(
        {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)},
        headroom_tokens=(k_max + 1) * (1 + target.limits.lookahead),
        guaranteed=limits.batch_scheduler_policy == "guaranteed_no_evict",
        target=target if shares_kv else None,
    )
    if shares_kv and (endpoint := os.environ.get("KV_EVENTS")):
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
