"""``spindle doctor --model``: which engines can serve a folder here, and what each would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from backend.config import EngineConfig, parse_config, why_not
from backend.kinds import KINDS, quantization_of
from backend.launcher.doctor import MISSING, OK, WARNING, Finding
from backend.machine import Machine, machine
from backend.storage.manifest import read_model_config


def report_model(model: str, *, as_json: bool, machine: Machine = machine) -> int:
    """Print what each engine says of a folder; return 1 where none can serve it, else 0."""
    found = findings(model, machine)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        for finding in found:
            print(f"{finding.name:<14} {finding.state:<8} {finding.text}")
    return 0 if found[-1].state == OK else 1


def findings(model: str, machine: Machine = machine) -> list[Finding]:
    """Ask every engine that loads Hugging Face folders; the last finding is what serving does."""
    folder = Path(model).expanduser().resolve()
    kinds = [name for name, kind in KINDS.items() if kind.checkpoint and kind.target]
    found = [_ask(name, folder, machine) for name in kinds]
    able = [finding.name for finding in found if finding.state == OK]
    if able and (reason := _refusal(folder)):
        found, able = [Finding("folder", MISSING, reason)], []
    if able and (method := quantization_of(read_model_config(folder))[0]):
        text = f"quantised ({method}); every engine widens them to bf16 when it loads them"
        found.insert(0, Finding("weights", OK, text))
    if not able:
        text = f"no engine can serve {folder} here"
        return [*found, Finding("serve", MISSING, text)]
    chosen = parse_config({"target": {"model": str(folder)}}, machine).target
    name = chosen.engine if chosen.engine in able else able[0]
    option = "" if name == chosen.engine else f', with "engine": "{name}" in a --config file'
    text = f"spindle serve --model {folder}{option}: engine {name}"
    return [*found, Finding("serve", OK, text)]


def _refusal(folder: Path) -> str:
    """Return why starting would refuse a folder, whatever the engine; '' where it would not."""
    from backend.model_folders import check_target

    try:
        check_target("--model", folder)
    except ValueError as error:
        return str(error)
    return ""


def _ask(name: str, folder: Path, machine: Machine) -> Finding:
    """Return what an engine's kind says of a folder."""
    from backend.engines import memory
    from backend.engines.registry import module_of

    device = "cpu" if "cpu" in KINDS[name].automatic else "cuda"
    asked = EngineConfig(engine=name, model=str(folder), device=device)
    if folder.is_dir() and (reason := why_not(name, asked, machine)):
        return Finding(name, WARNING, f"cannot: {reason}")
    try:
        target = {"engine": name, "model": str(folder), "device": device}
        config = parse_config({"target": target}, machine)
        engine = config.target
        kind = module_of(engine)
        kind.check_folder("--model", engine, config, lambda _: folder)
        planned = {name: kind.footprint(engine, config, folder)}
        free = {device: memory.available_bytes(engine, machine)}
        line = memory.check(planned, free, memory.process_bytes(config))
    except ValueError as error:
        return Finding(name, WARNING, f"cannot: {error}")
    return Finding(name, OK, f"can, in {engine.dtype}; {line}")
