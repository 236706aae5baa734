"""Whether a deployment can be served: its model folders, their vocabularies, and the memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EMBEDDED_MODEL, EngineConfig
from backend.engines import memory
from backend.engines.registry import Service, module_of
from backend.kinds import KINDS
from backend.machine import Machine, machine
from backend.published_heads import CONVERTED, is_published_head
from backend.storage import cache
from backend.storage.manifest import (
    check_pair,
    check_vocabulary,
    naming,
    read_manifest,
    read_model_config,
)
from backend.storage.tables import timed_engines
from backend.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def check_memory(
    config: ServingConfig, names: Collection[str] | None = None, machine: Machine = machine
) -> str:
    """Return and log what the engines (of these names; None: all) will take of memory. Raises
    ConfigError when there is less.
    """
    models = [engine for engine in timed_engines(config) if names is None or engine.name in names]
    if not models:
        return ""
    footprints = memory.plan(config, {engine.name: model_path(engine) for engine in models})
    available = {engine.device: memory.available_bytes(engine, machine) for engine in models}
    line = memory.check(footprints, available, memory.process_bytes(config))
    logger.info(line)
    return line


def with_kv(config: ServingConfig, machine: Machine = machine) -> ServingConfig:
    """Return a configuration whose KV is as large as fits on the GPU, where it leaves that open."""
    if config.limits.kv_cache_tokens:
        return config
    folders = {engine.name: model_path(engine) for engine in timed_engines(config)}
    free = memory.available_bytes(config.target, machine)
    tokens = memory.kv_tokens_that_fit(config, folders, free)
    logger.info("limits.kv_cache_tokens: %d fit", tokens)
    return replace(config, limits=replace(config.limits, kv_cache_tokens=tokens))


def model_path(engine: EngineConfig) -> Path:
    """Return the folder that an engine reads. Raises NotPreparedError for one that is to be
    converted first.
    """
    folder = named_folder(engine)
    served_folder = engine.kind.answer("served_folder", None) if engine.kind.model else None
    return served_folder(folder) if served_folder is not None else folder


def named_folder(engine: EngineConfig) -> Path:
    """Return the folder that an engine's setting names; a relative one lies where the packages
    do.
    """
    return (
        cache.model_folder(EMBEDDED_MODEL)
        if engine.model == EMBEDDED_MODEL
        else PROJECT_ROOT / os.path.expanduser(engine.model)
    )


def check_pairs(config: ServingConfig) -> None:
    """Raise ConfigError for a draft that has not its target's vocabulary, with the first token that
    differs.
    """
    check_folders(config)
    for draft in config.drafts:
        if draft.kind.measured:
            target, manifest = (
                read_manifest(model_path(config.target)),
                read_manifest(model_path(draft)),
            )
            check_pair(target, manifest, same_size=draft.kind.reads_target)


def check_folders(config: ServingConfig) -> None:
    """Raise ConfigError for a ``model`` that is not a folder that its engine's kind can serve, and
    for a draft with another tokenizer than its target; what is not converted yet is not compared.
    """
    keys = ("target", *(f"drafts[{index}]" for index in range(len(config.drafts))))
    for key, engine in zip(keys, config.engines, strict=True):
        if engine.kind.model and engine.model != EMBEDDED_MODEL:
            _check_kind(key, engine)
            module_of(engine).check_folder(f"{key}.model", engine, config, named_folder)
    target = named_folder(config.target)
    for draft in config.drafts if config.target.kind.checkpoint and target.is_dir() else ():
        if draft.kind.checkpoint and (folder := named_folder(draft)).is_dir():
            check_vocabulary(target, folder)


def check_packages(config: ServingConfig, machine: Machine = machine) -> None:
    """Raise ConfigError for a model that is not converted yet where packages for it are missing."""
    lacking, engines = machine.lacking_converters(), timed_engines(config)
    if lacking and any(engine.model == EMBEDDED_MODEL for engine in engines):
        try:
            cache.check(cache.model_folder(EMBEDDED_MODEL))
        except cache.CacheError:
            with cache.require_packages(f"converting {EMBEDDED_MODEL}"):
                raise ModuleNotFoundError(name=lacking[0]) from None
    if {"torch", "transformers"} & {*lacking}:
        convert_folders(config, str)  # raises, unless all are converted


def convert_folders(config: ServingConfig, say: Callable[[str], object]) -> None:
    """Let engines convert folders that they do not read as they are: the drafts first, for the
    target's graph has outputs for the layers that they read.
    """
    service = Service(config, 1, model_path)
    for engine in reversed(timed_engines(config)):
        convert = engine.kind.answer("convert", None)
        if convert is not None:
            convert(engine, named_folder(engine), service, say)


def check_target(key: str, folder: Path) -> None:
    """Raise ConfigError, beginning with the setting ``key``, for a target's folder that starting
    would refuse: its tokenizer cannot be loaded, or its tensors are not its model's.
    """
    from backend.engines.models.llama import check_tensors  # it imports NumPy

    with naming(key):
        load_tokenizer(folder)
        check_tensors(folder)


def _check_kind(key: str, engine: EngineConfig) -> None:
    """Raise ConfigError for a published draft head that another kind than its own is to load."""
    folder = named_folder(engine)
    try:
        raw = read_model_config(folder)
    except ConfigError:
        return  # the engine's own check says more
    if not is_published_head(folder, raw) or CONVERTED in engine.kind.architectures:
        return
    if key == "target":
        raise ConfigError(f"target.model: {folder} is a draft head: name it in drafts")
    kind = next(name for name, kind in KINDS.items() if CONVERTED in kind.architectures)
    text = f"must be {kind!r} or left out for the draft head {folder}"
    raise ConfigError(f"{key}.engine {text}, got {engine.engine!r}")
