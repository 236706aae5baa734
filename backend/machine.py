"""What this machine is, for the key of measured latencies, the provenance of results and the dtype
that ``auto`` means: hardware and versions, never a host or a user.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = (
    ("AMX-BF16", {"amx_bf16"}),
    ("AVX512-BF16", {"avx512_bf16"}),
    ("AVX512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("AVX2", {"avx2", "fma", "f16c"}),
)
"""What a product of matrices may run on, the best first, and the flags of Linux that mean it."""

_INT8 = {"avx_vnni", "avx512_vnni", "amx_int8"}

_PACKAGES = ("torch", "openvino", "numpy", "tokenizers", "tritonclient", "nvidia-pytriton")


def processor() -> str:
    """Return the processor's name and its instructions; a name alone may mask several generations
    (virtual machines: "AMD EPYC").
    """
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return f"{name} ({found})" if (found := instructions()) else name


def instructions() -> str:
    """Return the best of ``AMX-BF16``, ``AVX512-BF16``, ``AVX512`` and ``AVX2`` that the processor
    has, or nothing.
    """
    flags = set(_cpuinfo("flags").split())
    return next((name for name, needed in _INSTRUCTIONS if needed <= flags), "")


def multiplies_bf16() -> bool:
    """Return whether the processor has instructions for products in bf16: elsewhere they take
    several times as long as in fp32.
    """
    return instructions().endswith("BF16")


def multiplies_int8() -> bool:
    """Return whether the processor has instructions for products in int8 (VNNI, AMX)."""
    return bool(_INT8 & set(_cpuinfo("flags").split()))


def _cpuinfo(key: str) -> str:
    """Return what Linux says of the first core, or nothing."""
    try:
        lines = CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next(
        (
            value.strip()
            for line in lines
            for name, _, value in [line.partition(":")]
            if name.strip() == key
        ),
        "",
    )


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that time depends on, without
    importing them.
    """
    found = {package: _version(package) for package in _PACKAGES}
    return {"python": platform.python_version()} | {
        package: version for package, version in found.items() if version
    }


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


def device_name(device: str) -> str:
    """Return what a CUDA device is."""
    import torch

    return torch.cuda.get_device_name(device)
