"""``spindle doctor --model``: which engines can serve a folder, and what each would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config import parse_config
from backend.engine_config import EngineConfig, why_not
from backend.kinds import KINDS, quantization_of
from backend.launcher.doctor import MISSING, OK, WARNING, Finding, print_findings
from backend.machine import Machine, machine


def report(model: str, *, as_json: bool, machine: Machine = machine) -> int:
    """Print what each engine says of a folder; return 1 where none can serve it, else 0."""
    findings = check_engines(model, machine)
    print_findings(findings, as_json=as_json)
    return 0 if findings[-1].state == OK else 1


def check_engines(model: str, machine: Machine = machine) -> list[Finding]:
    """Ask every engine that loads Hugging Face folders; the last finding is what serving does."""
    from backend.storage.manifest import read_model_config

    folder = Path(model).expanduser().resolve()
    kinds = [name for name, kind in KINDS.items() if kind.checkpoint and kind.target]
    findings = [_ask(name, folder, machine) for name in kinds]
    able = [finding.name for finding in findings if finding.state == OK]
    if able and (reason := _refusal(folder)):
        findings, able = [Finding("folder", MISSING, reason)], []
    if able and (text := _weights(read_model_config(folder))):
        findings.insert(0, Finding("weights", OK, text))
    if not able:
        text = f"no engine can serve {folder} here"
        return [*findings, Finding("serve", MISSING, text)]
    target = parse_config({"target": {"model": str(folder)}}, machine).target
    name = target.engine if target.engine in able else able[0]
    option = "" if name == target.engine else f', with "engine": "{name}" in a --config file'
    text = f"spindle serve --model {folder}{option}: engine {name}"
    return [*findings, Finding("serve", OK, text)]


def _weights(config: dict[str, Any]) -> str:
    """Return how engines read the quantised weights of a folder; '' where it has none."""
    method = quantization_of(config)[0]
    if not method:
        return ""
    reasons: dict[str, str] = {}
    for name, kind in KINDS.items():
        misfit = kind.answer("misfit_of_four_bits", None)
        if misfit is not None and not (reason := misfit(config)):
            note = f"{name} keeps them on CPUs (dtype int4), other engines widen them to bf16"
            price = kind.answer("price_of_four_bits", str)(config)
            return f"quantised ({method}); {note}; {price}"
        reasons |= {name: reason} if misfit is not None else {}
    why = "".join(f"; {name} has no dtype int4 for it: {why}" for name, why in reasons.items())
    return f"quantised ({method}); every engine widens them to bf16 when it loads them{why}"


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
    wanted_engine = EngineConfig(engine=name, model=str(folder), device=device)
    if folder.is_dir() and (reason := why_not(name, wanted_engine, machine)):
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
