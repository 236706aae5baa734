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

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError, build_settings, setting
from backend.engine_config import (
    EMBEDDED_MODEL,
    EngineConfig,
    check_engine,
    runs_on_gpus,
    with_auto_resolved,
)
from backend.files import read_json
from backend.kinds import KINDS, Kind, kind_of
from backend.machine import Machine, machine

HOSTED = "backend.hosts.hosted"
"""The kind of a hosted engine's own drafter."""

DEFAULT_CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"

HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
"""A site as browsers name it: without a slash at its end."""


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

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        """The target and the drafts."""
        return self.target, *self.drafts


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
    if runs_on_gpus(target) and target.device != "cpu":
        limits = raw.get("limits") or {}
        defaults = {"prefill_chunk_tokens": GPU_CHUNK_TOKENS, "kv_cache_tokens": 0}
        merged = {name: limits.get(name, value) for name, value in defaults.items()}
        config = replace(config, limits=replace(config.limits, **merged))
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
            f"limits.max_active_requests must be at most {most} with target.lookahead 1 and "
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
    where = f"for the engine {target.engine!r}: target.engine_args set the drafter up"
    if config.drafts:
        raise ConfigError(f"drafts must be empty {where}")
    if "k_max" in raw.get("policy", {}):
        raise ConfigError(f"policy.k_max must be left out {where}, got {config.policy.k_max}")
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
            choices = f"one of {['auto', *KINDS]} or a dotted path like 'my_package.my_engine'"
            raise ConfigError(f"{where}.engine must be {choices}, got {name!r}")
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
        check_engine(where, engine)


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
        choices = f"one of {['adaptive', *BASELINES]} or a dotted path like 'my_package.MyPolicy'"
        like = closest(policy.kind, ["adaptive", *BASELINES])
        raise ConfigError(f"policy.kind must be {choices}, got {policy.kind!r}{like}")
    needs, numbers = BASELINES[policy.kind].needs, BASELINES[policy.kind].options
    for name, value in policy.options.items():
        if name not in numbers:
            choices = f"one of {list(numbers)}" if numbers else "left out"
            raise ConfigError(f"policy.options of {policy.kind!r} must be {choices}, got {name!r}")
        if type(value) is not int or value < 0:
            raise ConfigError(f"policy.options.{name} must be a whole number, got {value!r}")
    if "draft" in needs and policy.draft not in drafts:
        raise ConfigError(f"policy.draft must be one of {drafts}, got {policy.draft!r}")
    batches = [step.batch for step in policy.schedule]
    if "schedule" in needs and (not batches or len(set(batches)) < len(batches)):
        raise ConfigError(
            f"policy.schedule must have a length for each of several batch sizes, got "
            f"those of {batches}"
        )


def _resolve_openai(openai: OpenaiConfig, folder: Path) -> OpenaiConfig:
    """Return the front end's settings with an absolute template. Raises ConfigError for a name, a
    site or a file that is none.
    """
    for name in openai.allowed_hosts:
        if name != "*" and not HOST_NAME.fullmatch(name.removeprefix("*.")):
            choices = "names such as llm.example.com or *.example.com, or *"
            raise ConfigError(f"openai.allowed_hosts must be {choices}, got {name!r}")
    for site in openai.cors_origins:
        if site != "*" and not _ORIGIN.fullmatch(site):
            choices = "sites such as https://chat.example.com, or *"
            raise ConfigError(f"openai.cors_origins must be {choices}, got {site!r}")
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
