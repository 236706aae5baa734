"""The composition root: the only place that knows which engine, policy and tokenizer a
configuration means.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import policy
from backend.config import (
    EMBEDDED_MODEL,
    PROJECT_ROOT,
    ConfigError,
    EngineConfig,
    PolicyConfig,
    ServingConfig,
)
from backend.core.admission import Admission
from backend.core.drafting import Drafting
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import ReplySink, Session
from backend.engines import memory
from backend.engines.contention import overlapped
from backend.engines.port import Engine
from backend.engines.registry import Service, make_engine
from backend.engines.trtllm.deployment import check_engines, trtllm_tables
from backend.ops.learned_state import LearnedState, learned_key
from backend.ops.stats import Stats, StepStats
from backend.ops.switches import SwitchBoard
from backend.ops.trace_file import TraceFile
from backend.ops.tracing import Tracing
from backend.request import ErrorCode, GenerationRequest, RequestError, SamplingParams
from backend.sampling.guides import Grammars
from backend.sequence import BLOCK_TOKENS, Sequence
from backend.storage import cache
from backend.storage.manifest import check_folder, check_pair, read_manifest
from backend.storage.tables import load_tables, timed_engines
from backend.tokenizer import ByteTokenizer, IncrementalDecoder, Tokenizer, load_tokenizer
from policy import LatencyTable, wrappers
from policy.baselines import AcceptanceEma, SmartSpec, SpinSelection
from policy.decomposition import Decomposition
from policy.pipelining import FreeRuns, Pipelining
from policy.planner import Execution
from policy.replay import Traced

logger = logging.getLogger(__name__)

OVERHEAD_S, SPECULATION_S = 5e-4, 3e-4
"""Start values of what no table knows: a step's overhead, what speculating adds to it, a lookup.
Measured steps correct them.
"""

MERGE_TOKENS = 20.0
"""What merging a piece of a cut context costs in cached tokens read, by
``bench.micro.padding``.
"""

SEED_BITS = 53
"""Of a random seed: the reply names it, and readers of JSON that know doubles only keep it."""

LEAST_TEMPERATURE = 1e-5
"""Below it a temperature counts as 0: logits divided by it would leave the range of fp32."""
NO_END_ID = -1


@dataclass(slots=True)
class App:
    """A wired deployment: the loop, and how a request becomes one of its sessions. ``drafts`` are
    the engines that run, in order.
    """

    config: ServingConfig
    orchestrator: Orchestrator
    target: Engine
    drafts: list[Engine]
    tokenizer: Tokenizer
    stats: Stats
    step_stats: StepStats
    switches: SwitchBoard
    learned: LearnedState
    tracing: Tracing
    max_context_tokens: int
    contention: float | None
    close: Callable[[], None]
    grammars: Grammars
    _ids: itertools.count[int]

    def session(self, request: GenerationRequest, sink: ReplySink) -> Session:
        """Tokenise and check a request. Raises RequestError naming the field and the value."""
        check_ids(request, self.target.limits.vocab_size)
        ids = request.input_ids or request.prompt_token_ids
        prompt = (
            list(ids)
            if ids
            else self.tokenizer.encode(request.text_input, self.config.add_special_tokens)
        )
        _check(request, len(prompt), self.max_context_tokens, self.tokenizer.vocab_size)
        end_ids = (
            self.tokenizer.end_ids
            if request.end_id is None
            else frozenset({request.end_id} - {NO_END_ID})
        )
        if self.config.target.kind.asynchronous:
            _check_trtllm_turns(request)
        sampling = sampling_params(request, self.tokenizer, end_ids)
        if request.guide_type is not None:
            sampling = replace(
                sampling,
                guide=self.grammars.guide(request.guide_type, request.guide or "", end_ids),
            )
        logits_bytes = _logits_bytes(
            request, len(prompt), self.target.limits.vocab_size, self.config.limits.max_logits_bytes
        )
        number, salt = next(self._ids), request.cache_salt or ""
        if request.return_context_logits or request.return_prompt_log_probs:
            salt = (
                f"{salt}/{number}/{secrets.token_hex(8)}"  # KV that was found would have no logits
            )
        sequence = Sequence(number, prompt, len(prompt), sampling, salt=salt)
        sequence.context_logits, sequence.generation_logits = (
            request.return_context_logits,
            request.return_generation_logits,
        )
        sequence.prompt_log_probs = request.return_prompt_log_probs
        session = Session(
            sequence, request, end_ids, IncrementalDecoder(self.tokenizer.token_bytes), sink
        )
        session.logits_bytes = logits_bytes
        session.control = self.switches.current().in_control(session.id)
        return session


def sampling_params(
    request: GenerationRequest, tokenizer: Tokenizer, end_ids: frozenset[int]
) -> SamplingParams:
    """Return how to sample: nothing given means greedy, a seed is drawn for a request that gives
    none; words become token ids.

    Words are tokenised alone and without special tokens; one without tokens has no effect.
    """
    greedy = request.temperature is None and request.top_k is None and request.top_p is None
    temperature = 1.0 if request.temperature is None else request.temperature
    if greedy or temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    bad_words = (
        tuple(tokenizer.encode(word, add_special_tokens=False)) for word in request.bad_words
    )
    return SamplingParams(
        temperature=temperature,
        top_k=request.top_k or 0,
        top_p=request.top_p or 1.0,
        seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
        repetition_penalty=1.0
        if request.repetition_penalty is None
        else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=request.min_tokens or 0,
        end_ids=tuple(sorted(end_ids)),
        bad_words=(*(word for word in bad_words if word), *request.bad_word_ids),
        bias=_bias(request, tokenizer),
        log_probs=request.return_log_probs,
        top_log_probs=request.top_log_probs,
        top_p_decay=1.0 if request.top_p_decay is None else request.top_p_decay,
        top_p_min=request.top_p_min or 0.0,
        top_p_reset_id=-1 if request.top_p_reset_id is None else request.top_p_reset_id,
    )


def _bias(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return (token id, addend): every token of a word gets its weight, and weights of the same
    token add up.
    """
    addends: dict[int, float] = {}
    for token, addend in request.bias:
        addends[token] = addends.get(token, 0.0) + addend
    for word, weight in zip(
        request.embedding_bias_words, request.embedding_bias_weights, strict=True
    ):
        for token in tokenizer.encode(word, add_special_tokens=False):
            addends[token] = addends.get(token, 0.0) + weight
    return tuple((token, addend) for token, addend in sorted(addends.items()) if addend)


def build(config: ServingConfig, tables: Mapping[str, LatencyTable] | None = None) -> App:
    """Load the engines and wire the loop. ``tables`` (and then one thread) stand in for those
    measured on this machine.

    Raises ConfigError, LatencyError (a table is missing) or the engine's own error when something
    does not fit.
    """
    if Path(policy.__file__).resolve().parent.parent != PROJECT_ROOT:
        raise ConfigError(
            f"policy was imported from {policy.__file__}, backend from {PROJECT_ROOT}: one of "
            f"them is another project's"
        )
    check_policy(config)
    tokenizer = _tokenizer(config)
    threads = 1
    if tables is None:
        tables, threads = load_tables(
            config, {engine.name: model_path(engine) for engine in timed_engines(config)}
        )
        tables = {**tables, **trtllm_tables(config, model_path)}
    check_memory(config)
    stats = Stats()
    service = Service(config, threads, model_path, stats.count)
    target = make_engine(config.target, service)
    drafts = [make_engine(draft, service) for draft in config.drafts]
    contention = None
    if config.policy.cohorts > 1:
        target, contention = overlapped(target, drafts)
    cpu_only = all(
        not engine.kind.asynchronous and engine.device == "cpu"
        for engine in (config.target, *config.drafts)
    )
    step_stats = StepStats(stats, config.limits.max_active_requests, cpu_only=cpu_only)
    switches = SwitchBoard(config, step_stats)
    ledger = KVLedger(
        {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)},
        headroom_tokens=config.policy.k_max + 1,
        guaranteed=config.limits.batch_scheduler_policy == "guaranteed_no_evict",
        target=target
        if config.limits.enable_kv_cache_reuse and not config.target.kind.asynchronous
        else None,
    )
    planner = policy.SwitchedPolicy(
        make_policy(config, drafts, tables, step_stats, contention), switches.current
    )
    orchestrator = Orchestrator(
        target,
        Drafting(
            drafts,
            step_stats,
            monotonic,
            most_nodes=config.policy.k_max if target.limits.tree else 0,
        ),
        planner,
        ledger,
        Admission(
            ledger,
            config.limits.max_active_requests,
            config.limits.max_queued_requests,
            config.limits.max_logits_bytes,
        ),
        step_stats,
        monotonic,
        k_max=config.policy.k_max,
        prefill_chunk_tokens=config.limits.prefill_chunk_tokens,
        free_run_tokens=config.limits.free_run_tokens,
        max_request_s=config.limits.max_request_s,
        seed=config.policy.seed,
    )

    tracing = Tracing(step_stats)
    key = learned_key(config, {engine.name: model_path(engine) for engine in timed_engines(config)})
    learned = LearnedState(planner, orchestrator, step_stats, key, keep=config.policy.keep_learned)

    def close() -> None:
        tracing.close()
        for engine in (target, *drafts):
            engine.close()

    max_context = min(config.limits.max_context_tokens, target.limits.max_context_tokens)
    ids, grammars = itertools.count(1), Grammars(tokenizer)
    engines = orchestrator, target, drafts, tokenizer
    return App(
        config,
        *engines,
        stats,
        step_stats,
        switches,
        learned,
        tracing,
        max_context,
        contention,
        close,
        grammars,
        ids,
    )


def check_memory(config: ServingConfig, names: Collection[str] | None = None) -> None:
    """Log what the engines (of these names; None: all) will take of memory. Raises ConfigError when
    there is less.
    """
    models = [engine for engine in timed_engines(config) if names is None or engine.name in names]
    if models:
        footprints = memory.plan(config, {engine.name: model_path(engine) for engine in models})
        available = {engine.device: memory.available_bytes(engine) for engine in models}
        logger.info(memory.check(footprints, available, memory.process_bytes(config)))


def model_path(engine: EngineConfig) -> Path:
    """Return the folder of an engine's checkpoint; a relative one lies beside the packages."""
    return (
        cache.model_folder(EMBEDDED_MODEL)
        if engine.model == EMBEDDED_MODEL
        else PROJECT_ROOT / os.path.expanduser(engine.model)
    )


def _tokenizer(config: ServingConfig) -> Tokenizer:
    if not config.target.kind.tokenizer:
        return ByteTokenizer()
    if config.target.model == EMBEDDED_MODEL:
        cache.check(model_path(config.target))
    check_pairs(config)
    return load_tokenizer(model_path(config.target))


def check_pairs(config: ServingConfig) -> None:
    """Raise ConfigError for a draft that has not its target's vocabulary, with the first token that
    differs.
    """
    check_engines(config, model_path)
    check_folders(config)
    for draft in config.drafts:
        if draft.kind.measured:
            check_pair(read_manifest(model_path(config.target)), read_manifest(model_path(draft)))


def check_folders(config: ServingConfig) -> None:
    """Raise ConfigError for a torch engine whose ``model`` is not a folder that can be served."""
    keys = ("target", *(f"drafts[{index}]" for index in range(len(config.drafts))))
    for key, engine in zip(keys, (config.target, *config.drafts), strict=True):
        if engine.kind.on_cpu and engine.model != EMBEDDED_MODEL:
            needs = {"tokenizer": key == "target"}
            check_folder(f"{key}.model", engine.model, model_path(engine), **needs)


def make_policy(
    config: ServingConfig,
    drafts: list[Engine],
    tables: Mapping[str, LatencyTable],
    stats: StepStats,
    contention: float | None = None,
) -> policy.Policy:
    """Make the configured policy for these drafts; ``tables`` by the names of the engines that run
    a model, ``contention`` as of ``backend.engines.contention``.
    """
    if config.policy.kind == "none" or not drafts:
        return policy.NoSpeculation()
    latency, names = latency_model(config, tables), tuple(draft.name for draft in config.drafts)
    if config.policy.own:
        asked = config.policy
        with _kind_named():
            return wrappers.made(asked.kind, names, latency, asked.k_max, asked.options)
    if config.policy.kind != "adaptive":
        return _baseline(config.policy, names, latency)
    scored = all(draft.limits.scores or draft.limits.free for draft in drafts)
    constants = policy.PlannerConfig(
        k_max=config.policy.k_max,
        catchup_scored=scored,
    )
    planner = policy.AdaptivePlanner(names, latency, constants, _execution(config, contention))
    if not config.policy.trace_file:
        return planner
    return Traced(
        planner, TraceFile(Path(config.policy.trace_file), stats), config.policy.trace_lines
    )


def check_policy(config: ServingConfig) -> None:
    """Raise ConfigError where a user's policy is not to be found: before engines are loaded."""
    if config.policy.own:
        with _kind_named():
            wrappers.found(config.policy.kind)


@contextmanager
def _kind_named() -> Iterator[None]:
    """Raise a user's policy's PolicyError as ConfigError that names the setting."""
    try:
        yield
    except wrappers.PolicyError as error:
        raise ConfigError(f"policy.kind {error}") from error


def latency_model(config: ServingConfig, tables: Mapping[str, LatencyTable]) -> policy.LatencyModel:
    """Return the times of a deployment's passes by its tables. Raises LatencyError naming the
    engines that lack one.
    """
    known = {
        engine.name: tables.get(engine.name) or _known_times(engine)
        for engine in (config.target, *config.drafts)
    }
    return policy.LatencyModel.from_tables(
        known.pop(config.target.name), known, OVERHEAD_S, SPECULATION_S
    )


def _baseline(
    config: PolicyConfig, drafts: tuple[str, ...], latency: policy.LatencyModel
) -> policy.Policy:
    """Make a policy that the adaptive one is compared with."""
    match config.kind:
        case "fixed":
            return policy.FixedLength(config.draft, config.length)
        case "schedule":
            return policy.BatchSchedule(
                config.draft, {step.batch: step.length for step in config.schedule}
            )
        case "ema":
            return AcceptanceEma(config.draft)
        case "smartspec":
            return SmartSpec(drafts, config.draft, latency, config.k_max)
        case "spin":
            return SpinSelection(drafts, config.length)
        case kind:
            assert kind == "random", kind
            return policy.RandomChoice()


def _execution(config: ServingConfig, contention: float | None) -> Execution | None:
    """Return how plans are executed, where that is more than all rows in one pass."""
    if config.policy.cohorts > 1:
        return Pipelining(config.policy.cohorts, contention)
    if config.target.attention == "padded":
        return Decomposition(MERGE_TOKENS, BLOCK_TOKENS)
    if config.limits.free_run_tokens > 1:
        return FreeRuns(config.limits.free_run_tokens)
    return None


def _known_times(engine: EngineConfig) -> LatencyTable | None:
    """Return the times of an engine whose cost needs no measuring; None for one that runs a
    model.
    """
    seconds = engine.step_s or engine.kind.known_s
    if not engine.kind.known_s:
        return None
    return policy.LatencyTable.synthetic(engine.name, {1: seconds, 64: seconds})


def _check(
    request: GenerationRequest, prompt_tokens: int, max_context: int, vocab_size: int
) -> None:
    """Check what needs the tokenizer and the limits; types and ranges were checked where the
    tensors were decoded.
    """

    def refuse(message: str) -> None:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, message)

    prompt, length = (
        ("text_input", "max_tokens")
        if request.input_ids is None
        else ("input_ids", "request_output_len")
    )
    if prompt_tokens == 0:
        refuse(f"{prompt} has no tokens: {request.text_input!r}")
    if prompt_tokens >= max_context:
        refuse(f"{prompt} of {prompt_tokens} tokens is over the limit of {max_context - 1}")
    if prompt_tokens + request.max_tokens > max_context:
        refuse(
            f"{length} {request.max_tokens} and a prompt of {prompt_tokens} tokens exceed the "
            f"context of {max_context} tokens"
        )
    for name, value in (("end_id", request.end_id), ("pad_id", request.pad_id)):
        if value is not None and not NO_END_ID <= value < vocab_size:
            refuse(f"{name} must be -1 or a token id below {vocab_size}, got {value}")


def _check_trtllm_turns(request: GenerationRequest) -> None:
    """Refuse what TensorRT-LLM's executor would begin anew in every turn, or does not tell of one.
    Raises RequestError.
    """
    anew, untold = (
        "TensorRT-LLM's executor would begin it anew in every turn",
        "the TensorRT-LLM engine does not tell it turn by turn",
    )
    for name, value, reason in (
        ("guided_decoding_guide_type", request.guide_type, anew),
        ("runtime_top_p_decay", None if request.top_p_decay == 1.0 else request.top_p_decay, anew),
        ("return_context_logits", request.return_context_logits or None, untold),
        ("return_generation_logits", request.return_generation_logits or None, untold),
        ("return_prompt_log_probs", request.return_prompt_log_probs or None, untold),
        ("return_top_log_probs", request.top_log_probs, untold),
    ):
        if value is not None:
            raise RequestError(
                ErrorCode.UNIMPLEMENTED, f"{name} is not supported: {reason}, got {value!r}"
            )


def _logits_bytes(
    request: GenerationRequest, prompt_tokens: int, vocab_size: int, limit_bytes: int
) -> int:
    """Return what the logits that a request asks for take: they are kept in memory until it ends.
    Raises RequestError beyond the limit.
    """
    rows = (
        request.return_context_logits * prompt_tokens
        + request.return_generation_logits * request.max_tokens
    )
    if (size := rows * vocab_size * 4) > limit_bytes:
        name = (
            "return_context_logits" if request.return_context_logits else "return_generation_logits"
        )
        message = (
            f"{name}: {rows} rows of {vocab_size} logits are {size} bytes, over "
            f"limits.max_logits_bytes, {limit_bytes}"
        )
        raise RequestError(ErrorCode.INVALID_ARGUMENT, message)
    return size


def check_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Check what a request has as token ids. Raises RequestError naming the tensor and the id."""
    for name, ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("input_ids", request.input_ids or ()),
        ("stop_words_list", itertools.chain.from_iterable(request.stop_word_ids)),
        ("bad_words_list", itertools.chain.from_iterable(request.bad_word_ids)),
        (
            "logit_bias_ids" if request.input_ids is None else "embedding_bias",
            (token for token, _ in request.bias),
        ),
        (
            "runtime_top_p_reset_ids",
            () if request.top_p_reset_id in (None, NO_END_ID) else (request.top_p_reset_id,),
        ),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{name} must be of token ids below {vocab_size}, got {token}",
                )
