"""``serving.json`` -> ``ServingConfig``: the one file a user edits. An unknown key, a wrong type or
a value out of range is an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backend.files import read_json
from backend.kinds import KINDS, Kind, automatic, kind_of
from backend.machine import Machine, machine
from backend.published_heads import CONVERTED, is_published_head
from backend.settings import ConfigError, build_settings, setting

HOSTED = "backend.hosts.hosted"
"""The kind of a hosted engine's own drafter."""

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model that ``spindle prepare`` brings; any other ``model`` is a folder."""

PROJECT_ROOT = Path(__file__).resolve().parent.parent
"""The folder of the packages: a clone, or ``site-packages``."""

DEFAULT_CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"

HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
"""A site as browsers name it: without a slash at its end."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A target or a draft. ``auto`` of ``engine`` and ``dtype`` is resolved when the file is read
    (``with_auto_resolved``).
    """

    engine: str = "auto"
    """``auto``, a kind (``backend.kinds``), or the dotted path of a user's own,
    ``my_package.my_engine``: a module that has its ``KIND`` and answers for it.
    """
    name: str = "target"
    model: str = ""
    """A folder, or the embedded model's name where the kind loads Hugging Face folders. A relative
    folder is looked for where the ``serving.json`` is, then where the packages are (the shipped
    drafts).
    """
    dtype: str = setting("auto", choices=("auto", "bf16", "int4", "int8", "fp32", "fp64"))
    """``int4``: matrices of 4 bits as a quantised folder has them (``openvino``)."""
    lm_head: str = setting("folder", choices=("folder", "int8", "int4"))
    """With ``int4``, the format of the head's matrix: the folder's, or rounded to fewer bits, which
    a pass reads sooner.
    """
    device: str = "cpu"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: ``cuda`` where the engine of GPUs can run it; a
    draft that reads the target runs where that does.
    """
    invariant: bool = True
    """``openvino``: a request gives the same text, bit for bit, under any load and plan; ``cuda``:
    a row's logits have the same bits in every batch.
    """
    min_ngram: int = setting(2, low=1, high=16)  # of ``lookup`` and ``suffix``
    max_ngram: int = setting(4, low=1, high=16)  # of ``lookup`` and ``suffix``
    remembered_tokens: int = setting(2**18, low=4096, high=100_000_000)
    """``suffix``: the most tokens of answers that it keeps."""
    keep_remembered: bool = False  # ``suffix``: over restarts, too
    tree_width: int = setting(1, low=1, high=8)
    """``eagle``: the likeliest paths that a proposal goes on with at each depth."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of a user's own kind; ``step_s``, if there, is the seconds of a pass."""
    engine_args: dict[str, Any] = field(default_factory=dict, hash=False)
    """A hosted kind's (``vllm``): its engine's arguments, by that engine's names."""
    lookahead: int = setting(0, low=0, high=1)
    """``cuda`` target: submissions in flight besides the one that runs. With 1 heads propose on the
    target's device.
    """

    @property
    def step_s(self) -> float:
        """Seconds of a pass that the ``options`` of a user's own kind say; 0: they say none."""
        return float(self.options.get("step_s") or 0.0)

    @property
    def kind(self) -> Kind:
        """Facts about engines of its kind."""
        return kind_of(self.engine)


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """Up to ``batch`` requests that decode, ``length`` tokens are proposed."""

    batch: int = setting(1, low=1)
    length: int = setting(0, low=0, high=64)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which policy plans, and with what."""

    kind: str = "adaptive"
    """``adaptive``, one to compare it with (``policy.baselines``), or the dotted path of a user's
    own, ``my_package.MyPolicy`` (``policy.custom``).
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a user's policy; of a baseline, its own numbers
    (``Baseline.options``).
    """
    k_max: int = setting(8, low=0, high=64)
    draft: str = ""  # of baselines that use one
    length: int = setting(4, low=0, high=64)  # of baselines that do not choose it
    schedule: tuple[ScheduleStep, ...] = ()  # of the baseline ``schedule``
    guard: bool = True
    """Whether the adaptive planner's choice is compared with plain decoding now and then, and with
    the fixed choice of ``switches`` if there is one, and gives way where these are measured to be
    faster (``policy.guard``).
    """
    seed: int = 0
    keep_learned: bool = True  # in the cache folder, over restarts
    trace_file: str = ""
    """File of the first ``trace_lines`` lines of the adaptive planner's views and decisions, for
    ``python -m policy.replay``; empty: nowhere.
    """
    trace_lines: int = setting(10_000, low=1)

    @property
    def is_custom(self) -> bool:
        """Whether the kind is the dotted path of a user's policy."""
        return _is_dotted(self.kind)


LEAST_KV_TOKENS = 256
GPU_CHUNK_TOKENS = 2048
"""Tokens of prompts that a step takes on a GPU by default, where the host's part of a pass costs as
much as some hundred tokens.
"""


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds of the service, in requests and tokens."""

    max_active_requests: int = setting(64, low=1, high=4096)
    max_queued_requests: int = setting(128, low=1)
    max_request_s: float = setting(600.0, low=0.001)  # of a request's life, waiting included
    drain_s: float = setting(30.0, low=0.0, high=3600.0)
    """Seconds that requests in flight have to end after SIGTERM; new ones are refused."""
    max_context_tokens: int = setting(2048, low=16)
    prefill_chunk_tokens: int = setting(256, low=1)  # 2048 by default where a GPU runs the target
    kv_cache_tokens: int = setting(32768, low=0)
    """Tokens whose KV is kept, at least 256. 0, by default where a GPU runs the target: as many as
    nine tenths of its free memory hold, at most those of ``max_active_requests`` whole contexts.
    """
    batch_scheduler_policy: str = setting(
        "max_utilization", choices=("max_utilization", "guaranteed_no_evict")
    )
    """In TensorRT-LLM's words: admit by the KV that is needed now and pre-empt the latest request
    when it runs out, or reserve a request's whole life at admission.
    """
    enable_kv_cache_reuse: bool = True  # requests that begin alike share the KV of that
    max_logits_bytes: int = setting(64 * 1024 * 1024, low=0)


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Values that the launcher renders into ``config.pbtxt``."""

    decoupled_mode: bool = True
    max_batch_size: int = setting(64, low=1, high=4096)


@dataclass(frozen=True, slots=True)
class OpenaiConfig:
    """How the OpenAI front end answers, and which names and sites may call it."""

    chat_template: str = ""
    """File to use instead of the model's own chat template; a relative one is next to this file."""
    split_reasoning: bool = True
    """Whether reasoning is apart from an answer's content."""
    escape_special_tokens: bool = False
    """Whether special tokens that messages spell are plain text."""
    spec_decode_metrics: str = setting("summary", choices=("summary", "detailed", "none"))
    """Level of ``metrics.speculative_decoding`` in responses, as in vLLM."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides addresses and ``localhost``, by which requests without a key may call."""
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may call."""
    keep_alive_s: int = setting(75, low=1, high=86_400)
    """Seconds until an idle connection is closed; most proxies and clients do that after 60."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Form and least level of the log lines of the engine process and of the stubs."""

    format: str = setting("text", choices=("text", "json"))
    level: str = setting("info", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class SwitchesConfig:
    """How the operators' switches stand at start (see ``policy.Switches``); the administrative
    interface sets them live.
    """

    speculation: str = setting("on", choices=("on", "off", "shadow"))
    canary_share: float = setting(1.0, low=0.0, high=1.0)
    fixed_draft: str = ""
    fixed_length: int = setting(0, low=0, high=64)
    inter_token_cap_s: float = setting(0.0, low=0.0, high=3600.0)


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """A whole deployment. ``threads`` is a number of CPU threads or ``auto`` (whichever of 1 and
    all cores was measured faster).
    """

    target: EngineConfig = field(default_factory=EngineConfig)
    drafts: tuple[EngineConfig, ...] = ()
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    switches: SwitchesConfig = field(default_factory=SwitchesConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    triton: TritonConfig = field(default_factory=TritonConfig)
    openai: OpenaiConfig = field(default_factory=OpenaiConfig)
    log: LogConfig = field(default_factory=LogConfig)
    threads: int | str = "auto"
    add_special_tokens: bool = True


def load_config(path: str | Path, *, plans: bool = True) -> ServingConfig:
    """Read a ``serving.json``. Raises ConfigError naming the file, key and value. A process that
    does not plan leaves the policy to those that do: checking it imports the policy's compiler.
    """
    raw = read_json(Path(path))
    try:
        return parse_config(raw, plans=plans, folder=Path(path).absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_absolute_models(config: ServingConfig, folder: Path) -> ServingConfig:
    """Return a configuration whose models that lie in ``folder`` have absolute names."""

    def at(engine: EngineConfig) -> EngineConfig:
        inside = folder / engine.model
        is_there = engine.model not in ("", EMBEDDED_MODEL) and inside.is_dir()
        return replace(engine, model=str(inside)) if is_there else engine

    return replace(config, target=at(config.target), drafts=tuple(map(at, config.drafts)))


def parse_config(
    raw: Any, machine: Machine = machine, *, plans: bool = True, folder: Path | None = None
) -> ServingConfig:
    """Check a decoded ``serving.json``, which lies in ``folder``. Raises ConfigError naming key and
    value.
    """
    config: ServingConfig = build_settings(ServingConfig, raw, "")
    _import_kinds(config, folder)
    if folder is not None:
        config = with_absolute_models(config, folder)
    config = replace(config, openai=_resolve_openai(config.openai, folder or Path()))
    target = with_auto_resolved(config.target, machine)
    drafts = tuple(with_auto_resolved(draft, machine, target) for draft in config.drafts)
    config = _with_hosted_drafter(replace(config, target=target, drafts=drafts), raw)
    if _runs_on_gpus(target) and target.device != "cpu":
        own = raw.get("limits") or {}
        defaults = {"prefill_chunk_tokens": GPU_CHUNK_TOKENS, "kv_cache_tokens": 0}
        chosen = {name: own.get(name, value) for name, value in defaults.items()}
        config = replace(config, limits=replace(config.limits, **chosen))
    least = 0 if target.device != "cpu" else LEAST_KV_TOKENS
    if not (
        config.limits.kv_cache_tokens >= LEAST_KV_TOKENS or config.limits.kv_cache_tokens == least
    ):
        raise ConfigError(
            f"limits.kv_cache_tokens must be >= {LEAST_KV_TOKENS}, or 0 on a GPU (as many as fit), "
            f"got {config.limits.kv_cache_tokens}"
        )
    if config.threads != "auto" and (not isinstance(config.threads, int) or config.threads < 1):
        raise ConfigError(
            f"threads must be 'auto' or a number of at least 1, got {config.threads!r}"
        )
    _check_names(config)
    _check_engines(config)
    most, active = config.target.kind.most_ahead, config.limits.max_active_requests
    if config.target.lookahead and active > most:
        raise ConfigError(
            f"limits.max_active_requests must be at most {most} where target.lookahead is 1 for "
            f"the engine {config.target.engine!r}, got {active}"
        )
    if plans:
        _check_policy(config.policy, [draft.name for draft in config.drafts])
    _check_drafts(config)
    _check_switches(config.switches, config)
    return config


def _with_hosted_drafter(config: ServingConfig, raw: Mapping[str, Any]) -> ServingConfig:
    """Return a configuration whose draft is the drafter that a hosted target's own arguments set
    up, and whose proposals are as long as it allows. Raises ConfigError for settings that say
    otherwise.
    """
    target = config.target
    for index, draft in enumerate(config.drafts):
        if draft.kind.hosted:
            raise ConfigError(
                f"drafts[{index}].engine must not be {draft.engine!r}: it is a target"
            )
    if not target.kind.hosted:
        return config
    name, k_max = target.kind.answer("drafter", _no_drafter)(target)
    what = f"for the engine {target.engine!r}: target.engine_args set the drafter up"
    if config.drafts:
        raise ConfigError(f"drafts must be empty {what}")
    if "k_max" in raw.get("policy", {}):
        raise ConfigError(f"policy.k_max must be left out {what}, got {config.policy.k_max}")
    drafts = (EngineConfig(HOSTED, name),) if name else ()
    policy = replace(config.policy, k_max=k_max, draft=config.policy.draft or name)
    return replace(config, drafts=drafts, policy=policy)


def _no_drafter(target: EngineConfig) -> tuple[str, int]:
    """Return the drafter of a hosted kind that says nothing of one."""
    del target
    return "", 0


def _is_dotted(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


def own_folders(folder: Path | None) -> list[str]:
    """Return the last folders on sys.path where a user's own modules may be: next to the
    configuration, and where the launcher was started (``SPINDLE_POLICY_PATH``).
    """
    from_launcher = os.environ.get("SPINDLE_POLICY_PATH", "").split(os.pathsep)
    folders = dict.fromkeys([str(folder or ""), *from_launcher])
    return [folder for folder in folders if folder and folder not in sys.path]


def _import_kinds(config: ServingConfig, folder: Path | None) -> None:
    """Import the user's own kinds of engines. Raises ConfigError for one that cannot be, and for a
    kind that is unknown.
    """
    for where, engine in _engines(config):
        name = engine.engine
        if name == "auto" or name in KINDS:
            continue
        if not _is_dotted(name):
            known = f"one of {['auto', *KINDS]} or a dotted path like 'my_package.my_engine'"
            raise ConfigError(f"{where}.engine must be {known}, got {name!r}")
        if find_spec(name.partition(".")[0]) is None:
            sys.path += own_folders(folder)
        try:
            kind = kind_of(name)
        except Exception as error:  # a module of the user's raises what it likes
            raise ConfigError(f"{where}.engine {name!r} cannot be imported: {error}") from error
        if not isinstance(kind, Kind):
            raise ConfigError(f"{where}.engine {name!r} must have a KIND of backend.kinds.Kind")


def _engines(config: ServingConfig) -> list[tuple[str, EngineConfig]]:
    """Return all engines, each with where it stands in the file."""
    drafts = [(f"drafts[{place}]", draft) for place, draft in enumerate(config.drafts)]
    return [("target", config.target), *drafts]


def _check_names(config: ServingConfig) -> None:
    """Raise ConfigError for a target that is none, or a draft whose name or n-grams do not fit."""
    if not config.target.kind.target:
        targets = ", ".join(repr(name) for name, kind in KINDS.items() if kind.target)
        raise ConfigError(f"target.engine must be one of {targets}, got {config.target.engine!r}")
    names = [config.target.name, *(draft.name for draft in config.drafts)]
    for index, draft in enumerate(config.drafts):
        if names.count(draft.name) > 1 or draft.name in ("", "none"):
            raise ConfigError(
                f"drafts[{index}].name must be unique and neither '', 'none' nor the target's, "
                f"got {draft.name!r}"
            )
        if draft.min_ngram > draft.max_ngram:
            raise ConfigError(
                f"drafts[{index}].min_ngram must be at most max_ngram {draft.max_ngram}, got "
                f"{draft.min_ngram}"
            )


def _check_engines(config: ServingConfig) -> None:
    """Raise ConfigError for a model or a dtype that an engine's kind lacks."""
    for where, engine in _engines(config):
        if engine.kind.model and not engine.model:
            raise ConfigError(
                f"{where}.model must name a folder or {EMBEDDED_MODEL!r}, got {engine.model!r}"
            )
        loads_folders = engine.kind.checkpoint or engine.kind.hosted
        if engine.kind.model and not loads_folders and engine.model == EMBEDDED_MODEL:
            raise ConfigError(f"{where}.model must name an engine folder, got {engine.model!r}")
        _check_engine(where, engine)


def with_auto_resolved(
    engine: EngineConfig, machine: Machine = machine, target: EngineConfig | None = None
) -> EngineConfig:
    """Return an engine without ``auto``, which depends on machine and model alone, so that a text
    does. ``target`` is that of a draft.

    ``engine``: a draft's by its folder (``_kind_of_draft``); else the first of ``automatic`` that
    can run. ``device``: ``cuda`` where the best kind there can run. ``dtype``: int4 where the
    kind keeps a folder's 4 bits; int8 on CPUs where the kind prefers it; bf16 on GPUs and where the
    processor multiplies that; else fp32.
    """
    if engine.engine == "auto" and engine.model and target:
        engine = replace(engine, engine=_kind_of_draft(engine.model, target))
    if engine.device == "auto":
        reads_target = engine.engine != "auto" and engine.kind.reads_target
        on_gpu = not why_not(automatic("cuda")[0], replace(engine, device="cuda"), machine)
        own = "cuda" if on_gpu and _runs_on_gpus(engine) else "cpu"
        engine = replace(engine, device=target.device if reads_target and target else own)
    on_cpu = engine.device == "cpu"
    if engine.engine == "auto":
        known = automatic(engine.device)
        can_run = (name for name in known if not why_not(name, engine, machine))
        engine = replace(engine, engine=next(can_run, "torch"))
    if engine.dtype == "auto" and on_cpu and "int4" in engine.kind.dtypes:
        misfit = engine.kind.answer("misfit_of_four_bits", _all_widened)
        if not misfit(_model_config(engine.model)):
            engine = replace(engine, dtype="int4")
    if engine.dtype == "auto" and on_cpu and engine.kind.runs_int8:
        engine = replace(engine, dtype="int8")
    if engine.dtype == "auto":
        narrow = not on_cpu or not engine.kind.checkpoint or machine.multiplies_bf16()
        engine = replace(engine, dtype="bf16" if narrow else "fp32")
    return engine


def _all_widened(config: Mapping[str, Any]) -> str:
    del config
    return "its kind widens all folders"


def _kind_of_draft(model: str, target: EngineConfig) -> str:
    """Return the kind of a draft's folder; ``auto`` for a decoder, which several kinds load.

    A target of a kind that loads no Hugging Face folders has drafts of its own kind.
    """
    if target.kind.model and not target.kind.checkpoint:
        return target.engine
    config = _model_config(model)
    named = {*(config.get("architectures") or ())}
    if config and is_published_head(_folder(model), config):
        named = {CONVERTED}
    kinds = (name for name, kind in KINDS.items() if named & {*kind.architectures})
    return next((name for name in kinds if not KINDS[name].automatic), "auto")


def _runs_on_gpus(engine: EngineConfig) -> bool:
    return engine.engine == "auto" or (engine.kind.measured and not engine.kind.cpu_only)


def why_not(name: str, engine: EngineConfig, machine: Machine = machine) -> str:
    """Return why the kind ``name`` cannot run an engine's model on its device; empty where it can,
    as far as is known before anything is loaded.
    """
    kind = kind_of(name)
    if kind.missing:
        return f"{kind.missing} is not installed"
    capability = kind.answer("LEAST_CAPABILITY", 0.0) if engine.device != "cpu" else 0.0
    if capability:
        gpus = machine.gpus()
        if not gpus:
            return "no NVIDIA GPU is visible"
        if "+cpu" in (machine.package_version("torch") or ""):
            return "the installed torch is a CPU build"
        package = kind.answer("GPU_PACKAGE", "torch")
        if machine.package_version(package) is None:
            return f"{package} is not installed"
        least = min(gpus, key=lambda gpu: gpu.capability)
        if least.capability < capability:
            text = f"{least.name} has compute capability {least.capability}"
            return f"{text}, below {capability}"
    return _misfit(kind, engine)


def _gpu_dtypes(kind: Kind, engine: EngineConfig) -> tuple[str, ...]:
    """Return the dtypes that a kind runs where a GPU is the device, if not all."""
    return kind.answer("GPU_DTYPES", ()) if engine.device != "cpu" else ()


def _misfit(kind: Kind, engine: EngineConfig) -> str:
    """Return why a kind cannot run an engine's model where it runs others."""
    on_gpu = _gpu_dtypes(kind, engine)
    if on_gpu and engine.dtype not in ("auto", *on_gpu):
        return f"it does not run {engine.dtype} on a GPU"
    model = _model_config(engine.model)
    misfit = kind.misfit(model) if model else ""
    return f"its model has {misfit}" if misfit else ""


def _model_config(model: str) -> dict[str, Any]:
    """Return a folder's ``config.json``; nothing where there is none, which others report."""
    file = _folder(model) / "config.json"
    try:
        found = read_json(file) if model not in ("", EMBEDDED_MODEL) else {}
    except ConfigError:
        found = {}
    return found if isinstance(found, dict) else {}


def _folder(model: str) -> Path:
    return PROJECT_ROOT / Path(model).expanduser()


def unused_gpus(config: ServingConfig, machine: Machine = machine) -> dict[str, str]:
    """Return, by an engine's name, why the best kind on GPUs does not run it though its device is
    one, or there is one; nothing for an engine that it runs or could run.
    """
    best = automatic("cuda")[0]
    reasons = {}
    for engine in (config.target, *config.drafts):
        if engine.engine == best or not engine.kind.automatic:
            continue
        if engine.device != "cpu" or machine.gpus():
            device = engine.device if engine.device != "cpu" else "cuda"
            reasons[engine.name] = why_not(best, replace(engine, device=device), machine)
    return {name: reason for name, reason in reasons.items() if reason}


def slower_on_cpus(config: ServingConfig) -> dict[str, str]:
    """Return, by an engine's name, why the best kind on CPUs does not run it there; nothing for an
    engine that it runs or could run.
    """
    best = automatic("cpu")[0]
    reasons = {
        engine.name: why_not(best, engine)
        for engine in (config.target, *config.drafts)
        if engine.engine != best and engine.kind.automatic and engine.device == "cpu"
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _check_engine(where: str, engine: EngineConfig) -> None:
    """Check what an engine's kind runs, on what, and in which number formats."""
    kind, what = engine.kind, f"for the engine {engine.engine!r}"
    if engine.engine_args and not kind.hosted:
        raise ConfigError(f"{where}.engine_args must be empty {what}, got {engine.engine_args!r}")
    if engine.options and engine.engine in KINDS:
        raise ConfigError(f"{where}.options must be empty {what}, got {engine.options!r}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", engine.device):
        known = "'cpu', 'cuda', 'cuda:1' (or another number) or 'auto'"
        raise ConfigError(f"{where}.device must be {known}, got {engine.device!r}")
    if kind.missing:
        raise ConfigError(f"{where}.engine {engine.engine!r} needs {kind.missing}")
    if kind.cpu_only and engine.device != "cpu":
        raise ConfigError(f"{where}.device must be 'cpu' {what}, got {engine.device!r}")
    on_gpu = _gpu_dtypes(kind, engine)
    dtypes = on_gpu or kind.dtypes
    if dtypes and engine.dtype not in dtypes:
        names = ", ".join(map(repr, dtypes))
        on = f" on {engine.device}" if on_gpu else ""
        raise ConfigError(f"{where}.dtype must be one of {names} {what}{on}, got {engine.dtype!r}")
    if engine.dtype == "int8" and engine.device != "cpu":
        raise ConfigError(f"{where}.dtype 'int8' needs the device 'cpu', got {engine.device!r}")
    if engine.lm_head != "folder" and engine.dtype != "int4":
        text = f"{where}.lm_head {engine.lm_head!r} needs the dtype 'int4', got {engine.dtype!r}"
        raise ConfigError(text)
    if engine.lookahead and not (kind.most_ahead and where == "target"):
        able = " or ".join(repr(name) for name, kind in KINDS.items() if kind.most_ahead)
        raise ConfigError(
            f"{where}.lookahead must be 0 but for a target of {able}, got {engine.lookahead}"
        )


def _check_drafts(config: ServingConfig) -> None:
    for index, draft in enumerate(config.drafts):
        if draft.kind.reads_target and not config.target.kind.gives_states:
            giving = [repr(name) for name, kind in KINDS.items() if kind.gives_states]
            raise ConfigError(
                f"drafts[{index}].engine {draft.engine!r} reads the target, whose engine must be "
                f"{' or '.join(giving)}, got {config.target.engine!r}"
            )
        if (
            draft.kind.reads_target
            and config.target.lookahead
            and not draft.kind.answer("RUNS_IN_TARGET", False)
        ):
            raise ConfigError(
                f"target.lookahead must be 0 with drafts[{index}].engine {draft.engine!r}, which "
                f"the target's device does not run, got {config.target.lookahead}"
            )


def _check_policy(policy: PolicyConfig, drafts: list[str]) -> None:
    if policy.kind == "average":
        raise ConfigError("policy.kind 'average' was renamed to 'ema'")
    if policy.kind == "adaptive" and policy.options:
        raise ConfigError(f"policy.options must be empty for 'adaptive', got {policy.options!r}")
    if policy.kind != "adaptive" and not policy.is_custom:
        _check_baseline(policy, drafts)


def _check_baseline(policy: PolicyConfig, drafts: list[str]) -> None:
    """Raise ConfigError for a policy that there is not, or for one that lacks a setting."""
    from policy.baselines import BASELINES  # only here: most processes need none
    from policy.custom import closest

    if policy.kind not in BASELINES:
        known = f"one of {['adaptive', *BASELINES]} or a dotted path like 'my_package.MyPolicy'"
        like = closest(policy.kind, ["adaptive", *BASELINES])
        raise ConfigError(f"policy.kind must be {known}, got {policy.kind!r}{like}")
    needs, numbers = BASELINES[policy.kind].needs, BASELINES[policy.kind].options
    for name, value in policy.options.items():
        if name not in numbers:
            known = f"one of {list(numbers)}" if numbers else "left out"
            raise ConfigError(f"policy.options of {policy.kind!r} must be {known}, got {name!r}")
        if type(value) is not int or value < 0:
            raise ConfigError(f"policy.options.{name} must be a whole number, got {value!r}")
    if "draft" in needs and policy.draft not in drafts:
        raise ConfigError(f"policy.draft must be one of {drafts}, got {policy.draft!r}")
    batches = [step.batch for step in policy.schedule]
    if "schedule" in needs and (not batches or len(set(batches)) < len(batches)):
        raise ConfigError(
            f"policy.schedule must have a length for each of some different batch sizes, got "
            f"those of {batches}"
        )


def _resolve_openai(openai: OpenaiConfig, folder: Path) -> OpenaiConfig:
    """Return the front end's settings with an absolute template. Raises ConfigError for a name, a
    site or a file that is none.
    """
    for name in openai.allowed_hosts:
        if name != "*" and not HOST_NAME.fullmatch(name.removeprefix("*.")):
            known = "names such as llm.example.com or *.example.com, or *"
            raise ConfigError(f"openai.allowed_hosts must be {known}, got {name!r}")
    for site in openai.cors_origins:
        if site != "*" and not _ORIGIN.fullmatch(site):
            known = "sites such as https://chat.example.com, or *"
            raise ConfigError(f"openai.cors_origins must be {known}, got {site!r}")
    if not openai.chat_template:
        return openai
    file = folder.absolute() / Path(openai.chat_template).expanduser()
    if not file.is_file():
        raise ConfigError(f"openai.chat_template must name a file, got {openai.chat_template!r}")
    return replace(openai, chat_template=str(file))


def parse_switches(raw: Any, config: ServingConfig) -> SwitchesConfig:
    """Check switches set live as those of ``config`` are. Raises ConfigError naming key and
    value.
    """
    switches: SwitchesConfig = build_settings(SwitchesConfig, raw, "switches")
    _check_switches(switches, config)
    return switches


def _check_switches(switches: SwitchesConfig, config: ServingConfig) -> None:
    names, k_max = [draft.name for draft in config.drafts], config.policy.k_max
    if switches.fixed_length > k_max:
        raise ConfigError(
            f"switches.fixed_length must be at most policy.k_max {k_max}, got "
            f"{switches.fixed_length}"
        )
    if switches.fixed_draft not in names and (switches.fixed_length or switches.fixed_draft):
        raise ConfigError(
            f"switches.fixed_draft must be one of {names}, got {switches.fixed_draft!r}"
        )
