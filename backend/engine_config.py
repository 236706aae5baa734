"""One engine of ``serving.json``: its settings, the meaning of ``auto`` in them, and what its kind
can run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError, setting
from backend.files import read_json
from backend.kinds import KINDS, Kind, automatic, kind_of
from backend.machine import Machine, machine
from backend.published_heads import CONVERTED, is_published_head

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model that ``spindle prepare`` brings; any other ``model`` is a folder."""


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
        device = "cuda" if on_gpu and runs_on_gpus(engine) else "cpu"
        engine = replace(engine, device=target.device if reads_target and target else device)
    on_cpu = engine.device == "cpu"
    if engine.engine == "auto":
        kinds = automatic(engine.device)
        can_run = (name for name in kinds if not why_not(name, engine, machine))
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


def runs_on_gpus(engine: EngineConfig) -> bool:
    """Return whether an engine's kind, as far as it is known, has passes that GPUs can run."""
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
        config = read_json(file) if model not in ("", EMBEDDED_MODEL) else {}
    except ConfigError:
        config = {}
    return config if isinstance(config, dict) else {}


def _folder(model: str) -> Path:
    return PROJECT_ROOT / Path(model).expanduser()


def unused_gpus(engines: Iterable[EngineConfig], machine: Machine = machine) -> dict[str, str]:
    """Return, by an engine's name, why the best kind on GPUs does not run it though its device is
    one, or there is one; nothing for an engine that it runs or could run.
    """
    best = automatic("cuda")[0]
    reasons = {}
    for engine in engines:
        if engine.engine == best or not engine.kind.automatic:
            continue
        if engine.device != "cpu" or machine.gpus():
            device = engine.device if engine.device != "cpu" else "cuda"
            reasons[engine.name] = why_not(best, replace(engine, device=device), machine)
    return {name: reason for name, reason in reasons.items() if reason}


def slower_on_cpus(engines: Iterable[EngineConfig]) -> dict[str, str]:
    """Return, by an engine's name, why the best kind on CPUs does not run it there; nothing for an
    engine that it runs or could run.
    """
    best = automatic("cpu")[0]
    reasons = {
        engine.name: why_not(best, engine)
        for engine in engines
        if engine.engine != best and engine.kind.automatic and engine.device == "cpu"
    }
    return {name: reason for name, reason in reasons.items() if reason}


def check_engine(where: str, engine: EngineConfig) -> None:
    """Check what an engine's kind runs, on what, and in which number formats."""
    kind, label = engine.kind, f"for the engine {engine.engine!r}"
    if engine.engine_args and not kind.hosted:
        raise ConfigError(f"{where}.engine_args must be empty {label}, got {engine.engine_args!r}")
    if engine.options and engine.engine in KINDS:
        raise ConfigError(f"{where}.options must be empty {label}, got {engine.options!r}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", engine.device):
        choices = "'cpu', 'cuda', 'cuda:1' (or another number) or 'auto'"
        raise ConfigError(f"{where}.device must be {choices}, got {engine.device!r}")
    if kind.missing:
        raise ConfigError(f"{where}.engine {engine.engine!r} needs {kind.missing}")
    if kind.cpu_only and engine.device != "cpu":
        raise ConfigError(f"{where}.device must be 'cpu' {label}, got {engine.device!r}")
    on_gpu = _gpu_dtypes(kind, engine)
    dtypes = on_gpu or kind.dtypes
    if dtypes and engine.dtype not in dtypes:
        names = ", ".join(map(repr, dtypes))
        on = f" on {engine.device}" if on_gpu else ""
        raise ConfigError(f"{where}.dtype must be one of {names} {label}{on}, got {engine.dtype!r}")
    if engine.dtype == "int8" and engine.device != "cpu":
        raise ConfigError(f"{where}.dtype 'int8' needs the device 'cpu', got {engine.device!r}")
    if engine.lm_head != "folder" and engine.dtype != "int4":
        text = f"{where}.lm_head {engine.lm_head!r} needs the dtype 'int4', got {engine.dtype!r}"
        raise ConfigError(text)
    if engine.lookahead and not (kind.most_ahead and where == "target"):
        able = " or ".join(repr(name) for name, kind in KINDS.items() if kind.most_ahead)
        raise ConfigError(
            f"{where}.lookahead must be 0 except for a target of {able}, got {engine.lookahead}"
        )
