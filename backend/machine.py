"""What this machine is, for the key of measured latencies and the provenance of results: hardware and versions, never a host or a user."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "numpy", "tokenizers", "tritonclient", "nvidia-pytriton")


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that time depends on, without importing them."""
    found = {package: _version(package) for package in _PACKAGES}
    return {"python": platform.python_version()} | {package: version for package, version in found.items() if version}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    """Return processor, cores, memory (GiB), system and versions, JSON-able."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }
