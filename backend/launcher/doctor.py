"""``spindle doctor``: what this machine can do, and what is missing, with what to do about it.

It runs where packages are missing too: what needs them is imported once they are known to be there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError
from backend.config import ServingConfig, load_config
from backend.engine_config import EMBEDDED_MODEL, EngineConfig, unused_gpus, why_not
from backend.kinds import KINDS, automatic
from backend.launcher import checks
from backend.launcher.environment import (
    PORTS,
    RUN_PREFIX,
    LaunchError,
    LaunchSettings,
    port_trouble,
    read_settings,
)
from backend.launcher.processes import FRONT_END, command_line, listening_process
from backend.machine import Machine, machine
from backend.storage import cache

OK, WARNING, MISSING = "ok", "warning", "missing"
CACHE_GB, TEMPORARY_GB, SHARED_MEMORY_GB = 0.8, 0.1, 0.06
"""For the embedded model while it is made, for a run folder, for what stubs share with Triton."""

PINS = {"serve": "requirements.txt", "convert": "requirements-convert.txt"}
"""By extra, the file of a clone that has its pins."""

CUDA, TESTED_CAPABILITY = "cuda", 9.0
"""The finding's name, and the compute capability that kernels ran on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. With ``missing`` serving cannot work."""

    name: str
    state: str
    text: str


def report(*, as_json: bool, machine: Machine = machine) -> int:
    """Print every finding; return 1 if serving cannot work, else 0."""
    findings = check_everything(machine)
    print_findings(findings, as_json=as_json)
    can_serve = all(finding.state != MISSING for finding in findings)
    if not as_json:
        outcome = "will work" if can_serve else 'will not work: fix the items marked "missing"'
        print(f"`spindle serve` {outcome}")
    return 0 if can_serve else 1


def print_findings(findings: list[Finding], *, as_json: bool) -> None:
    """Print findings, a line each."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    for finding in findings:
        print(f"{finding.name:<14} {finding.state:<8} {finding.text}")


def check_everything(machine: Machine = machine) -> list[Finding]:
    """Check the machine, the ports and the configuration."""
    serving, all_pins = read_pins("serve"), read_pins("convert")
    installed = packages(machine, serving)
    findings = [
        _run_check("system", lambda: checks.check_system(machine)),
        _run_check("python", lambda: checks.check_python(machine)),
        _run_check("tritonserver", checks.check_triton),
        installed,
        conversion(machine, [pin for pin in all_pins if pin not in serving]),
        processor(machine),
        kernels(),
        memory(machine),
        _run_check("open files", lambda: checks.check_open_files(machine)),
        gpu(machine),
        *disks(machine),
        _run_check("run folder", lambda: checks.check_temporary(machine)),
    ]
    try:
        settings = read_settings(os.environ)
    except LaunchError as error:
        return [*findings, Finding("ports", MISSING, str(error))]
    return [
        *findings,
        *ports(settings),
        exposure(settings),
        *(deployment(settings.config, machine) if installed.state == OK else []),
    ]


def _run_check(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, OK, check())
    except LaunchError as error:
        return Finding(name, MISSING, str(error))


def packages(machine: Machine, pins: list[tuple[str, str]]) -> Finding:
    """Compare what is installed with the names and versions that are pinned."""
    installed = {name: machine.package_version(name) or "" for name, _ in pins}
    wrong = [pin for pin in pins if installed[pin[0]].partition("+")[0] != pin[1]]
    if wrong:
        command = f"pip install {' '.join('=='.join(pin) for pin in wrong)}"
        others = ", ".join(f"{name} {installed[name]}" for name, _ in wrong if installed[name])
        text = f"{command} (installed now: {others or 'none of these'})"
        return Finding("packages", MISSING, text)
    return Finding("packages", OK, "all that serving needs, as pinned")


def conversion(machine: Machine, pins: list[tuple[str, str]]) -> Finding:
    """Say whether a model that was not served before can be: its folder is converted first."""
    if lacking := machine.lacking_converters():
        text = f"{', '.join(lacking)} not installed: only models that were served before are served"
        return Finding("conversion", WARNING, f"{text}; for others, install spindle[convert]")
    versions = packages(machine, pins)
    is_fine = versions.state == OK
    text = f"torch {machine.package_version('torch')}, all as pinned" if is_fine else versions.text
    return Finding("conversion", versions.state, text)


def read_pins(extra: str, folder: Path = PROJECT_ROOT) -> list[tuple[str, str]]:
    """Return the names and versions of an extra: of a clone's file, else of the distribution."""
    file = folder / PINS[extra]
    if file.is_file():
        lines = file.read_text("utf-8").splitlines()
    else:
        lines = [
            line
            for line in metadata.requires("spindle") or []
            if re.search(f"extra == .{extra}.$", line)
        ]
    matches = (re.match(r"([\w.-]+)(?:\[.*?\])?==([\w.]+)", line) for line in lines)
    return [(match[1], match[2]) for match in matches if match]


def processor(machine: Machine) -> Finding:
    """Say what matrices are multiplied in, and so what ``auto`` means."""
    instructions = machine.instructions()
    if not instructions:
        text = f"{machine.processor()}: no AVX2, so dtype auto is fp32; slow"
        return Finding("processor", WARNING, text)
    dtype = "bf16" if machine.multiplies_bf16() else "fp32"
    int8 = "int8 products" if machine.multiplies_int8() else "no int8 products"
    return Finding("processor", OK, f"{machine.processor()}, {int8}: dtype auto is {dtype}")


def kernels() -> Finding:
    """Say whether the best kind that ``auto`` may mean on CPUs can run."""
    best, *others = automatic("cpu")
    if missing := KINDS[best].missing:
        text = f"pip install {missing}; until then engine auto is {others[0]} on CPUs, and slower"
        return Finding("kernels", WARNING, text)
    return Finding("kernels", OK, f"engine auto is {best} on CPUs")


def memory(machine: Machine) -> Finding:
    """Say how many cores and how much memory there are."""
    total_gib, free_gib = machine.memory_bytes() / 2**30, machine.free_memory_bytes() / 2**30
    text = f"{machine.cores()} cores, {total_gib:.1f} GiB of memory, {free_gib:.1f} free"
    if machine.cores() < 2:
        return Finding(
            "cores, memory",
            WARNING,
            f"{text}: the engine shares the only core with Triton; give it two",
        )
    return Finding("cores, memory", OK, text)


def gpu(machine: Machine) -> Finding:
    """Say which GPUs there are, and whether the engine for them can run there."""
    gpus = machine.gpus()
    if not gpus:
        return Finding("gpu", OK, "none: the processor serves")
    names = "; ".join(f"{gpu}, compute capability {gpu.capability}" for gpu in gpus)
    names += f", driver {gpus[0].driver}"
    best, *others = automatic("cuda")
    if reason := why_not(best, EngineConfig(device="cuda"), machine):
        text = f"{names}: {reason}, so engine auto is {others[0]} there, and slower"
        return Finding("gpu", WARNING, text)
    kernels = f"triton {machine.package_version('triton')}"
    return Finding("gpu", OK, f"{names}, {kernels}: engine auto is {best} on device cuda")


def disks(machine: Machine) -> list[Finding]:
    """Say how much room there is where files are written."""
    places = (
        ("cache", cache.root(), CACHE_GB, "--cache chooses another place"),
        ("temporary", machine.temporary_folder(), TEMPORARY_GB, "set TMPDIR to another folder"),
        (
            "shared memory",
            machine.shared_memory_folder(),
            SHARED_MEMORY_GB,
            "in a container: --shm-size 1g",
        ),
    )
    return [disk(machine, *place) for place in places]


def disk(machine: Machine, name: str, folder: Path, needed_gb: float, advice: str) -> Finding:
    """Say whether a folder, which need not exist yet, has so much room and can be written."""
    places = (folder, *folder.absolute().parents)
    there = next((place for place in places if place.is_dir()), Path("/"))
    free_gb = machine.free_disk_bytes(there) / 1e9
    if not machine.can_write(there):
        return Finding(name, MISSING, f"{folder} cannot be written: {advice}")
    text = f"{folder}, {free_gb:.1f} GB free"
    if free_gb < needed_gb:
        return Finding(name, WARNING, f"{text}, {needed_gb:g} GB may be needed: {advice}")
    return Finding(name, OK, text)


def ports(settings: LaunchSettings) -> list[Finding]:
    """Report for each port whether it is free, or which process listens on it."""
    findings = []
    for (name, option, _), port in zip(PORTS, settings.ports, strict=True):
        label = name.lower().replace("_", " ")
        at = f"{port} on {settings.bind}"
        if why := port_trouble(settings.bind, port):
            text = f"{why}{checks.listener(port)}. Choose another with {option}"
            if (pid := listening_process(port)) and _is_spindle(command_line(pid)):
                text = f"Spindle runs there, process {pid}; a second needs {option}"
            findings.append(Finding(label, MISSING, f"{at}: {text}"))
        else:
            text = f"{at} is free" if port else "none: no OpenAI front end"
            findings.append(Finding(label, OK, text))
    return findings


def exposure(settings: LaunchSettings) -> Finding:
    """Say whether other machines may reach Triton."""
    if settings.is_open:
        return Finding("exposure", WARNING, f"BIND {settings.bind} {checks.OPEN_TRITON}")
    return Finding("exposure", OK, f"only this machine reaches {settings.bind}")


def _is_spindle(command: list[str]) -> bool:
    """Return whether a command is a server's of ours or its front end's."""
    return FRONT_END in command or any(f"/{RUN_PREFIX}" in word for word in command)


def deployment(path: Path, machine: Machine = machine) -> list[Finding]:
    """Say whether a configuration can be served, and what of it is prepared."""
    from backend.model_folders import check_folders, check_target, named_folder
    from backend.storage.tables import timed_engines

    try:
        config = load_config(path)
        check_folders(config)
        if config.target.kind.checkpoint and config.target.model != EMBEDDED_MODEL:
            check_target("target.model", named_folder(config.target))
    except ConfigError as error:
        return [Finding("configuration", MISSING, str(error))]
    findings = [Finding("configuration", OK, str(path))]
    has_gpu = any(engine.device != "cpu" for engine in timed_engines(config))
    if has_gpu:
        findings.append(cuda(config, machine))
    if not config.target.kind.checkpoint:
        return findings
    if model := conversions(config, machine):
        findings.append(model)
    if all(finding.state != MISSING for finding in findings) and (not model or model.state == OK):
        findings.append(tables(config, machine))
        findings += [gpu_memory(config, machine)] if has_gpu else []
    return findings


def cuda(config: ServingConfig, machine: Machine) -> Finding:
    """Say what engines on a GPU would run on."""
    gpus, build, best = machine.gpus(), machine.cuda_build(), automatic("cuda")[0]
    if not gpus:
        return Finding(CUDA, MISSING, "no NVIDIA GPU is visible: set device to cpu or auto")
    if not build:
        return Finding(CUDA, MISSING, "the installed torch is a CPU build: install one for CUDA")
    text = f"driver {gpus[0].driver}, torch {machine.package_version('torch')} for CUDA {build}"
    if not machine.cuda_works():
        return Finding(
            CUDA, MISSING, f"{text} cannot use the GPU: the driver may be too old for it"
        )
    triton = machine.package_version("triton")
    capability = min(gpu.capability for gpu in gpus)
    tested = "tested" if capability == TESTED_CAPABILITY else "not tested, expected to work"
    text += f", triton {triton}, compute capability {capability} ({tested})"
    reasons = unused_gpus(config.engines, machine)
    text += "".join(f"; {name} is not run by {best}: {why}" for name, why in reasons.items())
    is_fine = capability == TESTED_CAPABILITY and not reasons
    return Finding(CUDA, OK if is_fine else WARNING, text)


def gpu_memory(config: ServingConfig, machine: Machine) -> Finding:
    """Say whether a deployment's plan fits into what is free."""
    from backend.engines.registry import NotPreparedError
    from backend.model_folders import check_memory, with_kv

    try:
        return Finding("memory plan", OK, check_memory(with_kv(config, machine), machine=machine))
    except NotPreparedError as error:
        return Finding("memory plan", WARNING, str(error))
    except (ValueError, RuntimeError) as error:
        return Finding("memory plan", MISSING, str(error))


def conversions(config: ServingConfig, machine: Machine = machine) -> Finding | None:
    """Say whether the embedded model is converted, and whether other models can be that are not;
    None where nothing is to be said.
    """
    from backend.model_folders import check_packages
    from backend.storage.tables import timed_engines

    try:
        check_packages(config, machine)
    except ValueError as error:
        return Finding("model", MISSING, str(error))
    if EMBEDDED_MODEL not in [engine.model for engine in timed_engines(config)]:
        return None
    try:
        cache.check(cache.model_folder(EMBEDDED_MODEL))
    except cache.CacheError:
        text = "not converted yet: the first start or `spindle prepare` converts it"
        return Finding("model", WARNING, text)
    return Finding("model", OK, f"{EMBEDDED_MODEL} is converted")


def tables(config: ServingConfig, machine: Machine = machine) -> Finding:
    """Say whether the engines were measured here, and whether the drafts fit the target."""
    from backend.engines.registry import NotPreparedError
    from backend.model_folders import check_pairs, model_path
    from backend.storage.tables import load_tables, missing_tables, timed_engines

    try:
        check_pairs(config)
        folders = {engine.name: model_path(engine) for engine in timed_engines(config)}
        missing = missing_tables(config, folders, machine)
    except NotPreparedError as error:
        return Finding("measured", WARNING, f"{error} (the first start does so, too)")
    except ValueError as error:
        return Finding("measured", MISSING, str(error))
    if missing:
        return Finding(
            "measured",
            WARNING,
            f"not yet: {', '.join(missing)}. The first start or `spindle prepare` measures them",
        )
    if any(table.provenance.busy for table in load_tables(config, folders)[0].values()):
        text = "while other programs ran; the next start on a quiet machine measures again"
        return Finding("measured", WARNING, text)
    return Finding("measured", OK, "every engine of the configuration")
