"""Which measured latency tables belong to a deployment: a file is named by a hash of everything
that its times depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.machine import Machine, machine
from backend.storage import cache
from backend.storage.manifest import read_manifest
from policy.latency import LatencyError, LatencyTable


def timed_engines(config: ServingConfig) -> list[EngineConfig]:
    """Return the engines whose passes are measured, the target first: those that run a model. A
    draft that the target runs has its ``lookahead``.
    """
    ahead = config.target.lookahead
    return [
        replace(engine, lookahead=ahead) if engine.kind.reads_target else engine
        for engine in config.engines
        if engine.kind.measured
    ]


def load_tables(
    config: ServingConfig, folders: Mapping[str, Path]
) -> tuple[dict[str, LatencyTable], int]:
    """Return the tables by engine name, and the number of threads that they were measured with:
    serve with as many.

    ``folders`` are the checkpoints of ``timed_engines`` by engine name. A target whose threads are
    ``auto`` was measured with the faster number, and its drafts with the same. Raises LatencyError
    for a table that is missing or unsound, ConfigError for a bad folder.
    """
    tables: dict[str, LatencyTable] = {}
    threads = config.threads
    for engine in timed_engines(config):
        path = table_file(engine, folders[engine.name], threads)
        tables[engine.name] = read_table(path)
        threads = tables[engine.name].provenance.threads
    # nothing was measured where no model runs
    return tables, 1 if threads == "auto" else int(threads)


def missing_tables(
    config: ServingConfig, folders: Mapping[str, Path], machine: Machine = machine
) -> list[str]:
    """Return the engines without a sound table; all of them where it is the target's, for drafts
    run with its threads.
    """
    target, *drafts = timed_engines(config)
    table = _table(target, folders, config.threads, machine)
    if table is None:
        return [engine.name for engine in (target, *drafts)]
    threads = table.provenance.threads
    return [draft.name for draft in drafts if _table(draft, folders, threads, machine) is None]


def _table(
    engine: EngineConfig, folders: Mapping[str, Path], threads: int | str, machine: Machine
) -> LatencyTable | None:
    try:
        return read_table(table_file(engine, folders[engine.name], threads, machine))
    except LatencyError:
        return None


def table_file(
    engine: EngineConfig, folder: Path, threads: int | str, machine: Machine = machine
) -> Path:
    """Return where an engine's table lives; ``threads`` is a number or the target's ``auto``.
    Raises ConfigError for a bad folder.
    """
    subject = {
        "processor": machine.processor(),
        "cores": machine.cores(),
        "engine": [engine.engine, engine.kind.behaviour],
        "packages": {name: machine.package_version(name) for name in packages_of(engine)},
        "layout_sha256": read_manifest(folder).layout_sha256,
        "dtype": engine.dtype,
        "device": engine.device,
        "invariant": engine.invariant,
        "threads": threads,
    }
    if engine.lm_head != "folder":
        subject["lm_head"] = engine.lm_head
    if engine.lookahead:
        subject["lookahead"] = engine.lookahead
    if engine.tree_width > 1:
        subject["tree_width"] = engine.tree_width
    if engine.device != "cpu":
        subject["device_name"] = machine.device_name(engine.device)
    return cache.table_file(hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:32])


def packages_of(engine: EngineConfig) -> list[str]:
    """Return the packages that an engine's times depend on: those of its kind, on GPUs torch."""
    kind = engine.kind
    names = {package[0] for package in (kind.package, kind.int8_package) if package}
    return sorted(names | ({"torch"} if engine.device != "cpu" else set()))


def read_table(path: Path) -> LatencyTable:
    """Return the table in a file. Raises LatencyError naming the file and what is wrong."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        return LatencyTable.from_dict(raw if isinstance(raw, dict) else {})
    except FileNotFoundError:
        text = f"no latency table {path} (`spindle prepare` measures one)"
        raise LatencyError(text) from None
    except (OSError, ValueError) as error:
        raise LatencyError(f"{path}: {error}") from error
