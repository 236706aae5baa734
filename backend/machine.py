"""The machine that Spindle runs on: hardware, system and packages, never a host or a user.

The key of measured latencies, the provenance of results, the dtype that ``auto`` means and the
launcher's checks all ask ``machine``; a test gives them another ``Machine``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import resource
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from time import perf_counter, process_time

_INSTRUCTIONS = (
    ("AMX-BF16", {"amx_bf16"}),
    ("AVX512-BF16", {"avx512_bf16"}),
    ("AVX512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("AVX2", {"avx2", "fma", "f16c"}),
)
"""Units that a product of matrices may run on, the best first, and the flags of Linux that mean it.
"""

_INT8 = {"avx_vnni", "avx512_vnni", "amx_int8"}

_CONVERTERS = ("torch", "transformers", "gguf")
"""Packages that convert a model the first time it is served."""
_PACKAGES = ("torch", "openvino", "numpy", "tokenizers", "tritonclient", "nvidia-pytriton")

_QUIET_SHARE = 0.9

_NVIDIA_SMI_LIMIT_S = 20.0
_NVIDIA_SMI_QUERY = "index,name,memory.total,driver_version,compute_cap"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts that nvidia-smi reports of a GPU."""

    name: str
    memory: str
    """With its unit."""
    driver: str
    """The version of NVIDIA's driver."""
    capability: float
    """CUDA's compute capability, 9.0 for an H100."""

    def __str__(self) -> str:
        return f"{self.name}, {self.memory}"


@cache
def _nvidia_smi() -> str:
    """Return a line for each GPU, once for a process; nothing without one."""
    program = shutil.which("nvidia-smi")
    if program:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = [program, f"--query-gpu={_NVIDIA_SMI_QUERY}", "--format=csv,noheader"]
            return subprocess.check_output(query, text=True, timeout=_NVIDIA_SMI_LIMIT_S)
    return ""


_GPU_FACTS = len(_NVIDIA_SMI_QUERY.split(",")) - 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


class Machine:
    """Facts about one machine, each read when it is asked for."""

    def cpu_info(self) -> str:
        """Return what Linux says of the cores, or nothing."""
        with contextlib.suppress(OSError):
            return Path("/proc/cpuinfo").read_text("utf-8")
        return ""

    def processor(self) -> str:
        """Return the processor's name and its instructions; a name alone may mask several
        generations (virtual machines: "AMD EPYC").
        """
        name = self._first_core("model name") or platform.processor() or platform.machine()
        return f"{name} ({best})" if (best := self.instructions()) else name

    def instructions(self) -> str:
        """Return the best of ``AMX-BF16``, ``AVX512-BF16``, ``AVX512`` and ``AVX2`` that the
        processor has, or nothing.
        """
        flags = set(self._first_core("flags").split())
        return next((name for name, needed in _INSTRUCTIONS if needed <= flags), "")

    def multiplies_bf16(self) -> bool:
        """Return whether the processor has instructions for products in bf16: elsewhere they take
        several times as long as in fp32.
        """
        return self.instructions().endswith("BF16")

    def multiplies_int8(self) -> bool:
        """Return whether the processor has instructions for products in int8 (VNNI, AMX)."""
        return bool(_INT8 & set(self._first_core("flags").split()))

    def _first_core(self, key: str) -> str:
        pairs = (line.partition(":") for line in self.cpu_info().splitlines())
        return next((value.strip() for name, _, value in pairs if name.strip() == key), "")

    def cores(self) -> int:
        """Return how many CPU cores this process may use."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def free_share(self, seconds: float = 0.2) -> float:
        """Return the share of its cores that this process gets now, by keeping all of them busy for
        some seconds: below 1 where other programs run.
        """
        until_s, data = perf_counter() + seconds, bytes(1 << 20)

        def work() -> None:
            while perf_counter() < until_s:
                hashlib.sha256(data)  # without Python's lock

        threads = [threading.Thread(target=work) for _ in range(self.cores())]
        wall_s, cpu_s = perf_counter(), process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = (process_time() - cpu_s) / (perf_counter() - wall_s)
        return got / min(len(threads), self.cpu_quota())

    def cpu_quota(self) -> float:
        """Return the cores' worth of time that the control group (v2) allows; inf: no limit."""
        with contextlib.suppress(OSError):
            quota, period_us = Path("/sys/fs/cgroup/cpu.max").read_text("utf-8").split()
            return math.inf if quota == "max" else int(quota) / int(period_us)
        return math.inf

    def is_busy(self) -> bool:
        """Return whether other programs take a part of the cores that changes measured times."""
        return self.free_share() < _QUIET_SHARE

    def memory_bytes(self) -> int:
        """Return how much memory there is."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_memory_bytes(self) -> int:
        """Return how much memory is free now."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def system(self) -> tuple[str, str]:
        """Return the operating system and the processor's architecture."""
        return platform.system(), platform.machine()

    def glibc(self) -> str:
        """Return the version of glibc, or ``unknown``."""
        return (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc ")

    def library_folder(self, name: str) -> Path | None:
        """Return the folder that Python's shared library of this name is in, None without one."""
        folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
        for candidate in (folder, folder / str(sysconfig.get_config_var("MULTIARCH"))):
            if (candidate / name).exists():
                return candidate
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return folder  # the loader's own search path has it
        return None

    def package_version(self, name: str) -> str | None:
        """Return the version of an installed package, without importing it."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
        return None

    def lacking_converters(self) -> list[str]:
        """Return the packages that convert a model and are not installed."""
        return [name for name in _CONVERTERS if not self.package_version(name)]

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the installed packages that time depends on."""
        packages = {name: self.package_version(name) for name in _PACKAGES}
        return {"python": platform.python_version()} | {
            name: version for name, version in packages.items() if version
        }

    def nvidia_smi(self) -> str:
        """Return nvidia-smi's lines of index, name, memory, driver and compute capability."""
        return _nvidia_smi()

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that CUDA shows this process (``CUDA_VISIBLE_DEVICES``)."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = None if visible is None else visible.replace(" ", "").split(",")
        gpus = []
        for line in self.nvidia_smi().splitlines():
            index, *facts = (part.strip() for part in line.split(","))
            is_named = numbers is None or not all(map(_is_number, numbers)) or index in numbers
            if is_named and numbers not in ([""], ["-1"]) and len(facts) == _GPU_FACTS:
                name, memory, driver, capability = facts
                gpus.append(Gpu(name, memory, driver, float(capability)))
        return gpus

    def device_name(self, device: str) -> str:
        """Return what a CUDA device is. Raises ValueError where torch cannot use it."""
        import torch

        try:
            return torch.cuda.get_device_name(device)
        except (AssertionError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            text = f"device {device!r} cannot be used: {reason}"
            raise ValueError(
                f"{text}. Set it to 'cpu' or 'auto'; spindle doctor says more"
            ) from None

    def cuda_build(self) -> str:
        """Return the CUDA that the installed torch is built for; empty for a CPU build."""
        import torch

        return torch.version.cuda or ""

    def cuda_works(self) -> bool:
        """Return whether torch can use a GPU: the driver is there and new enough."""
        import torch

        return torch.cuda.is_available()

    def free_gpu_bytes(self, device: str) -> int:
        """Return how much memory is free on a CUDA device."""
        import torch

        return torch.cuda.mem_get_info(device)[0]

    def temporary_folder(self) -> Path:
        """Return the folder for temporary files."""
        return Path(tempfile.gettempdir())

    def shared_memory_folder(self) -> Path:
        """Return the folder of shared memory."""
        return Path("/dev/shm")

    def free_disk_bytes(self, folder: Path) -> int:
        """Return how much room a folder's disk has."""
        return shutil.disk_usage(folder).free

    def is_noexec(self, folder: Path) -> bool:
        """Return whether programs and libraries in a folder cannot be run."""
        return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)

    def open_files(self) -> tuple[int, int]:
        """Return how many files this process may open, and how many it may ask for."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def can_write(self, folder: Path) -> bool:
        """Return whether this user may make files in a folder."""
        return os.access(folder, os.W_OK)

    def describe(self) -> dict[str, object]:
        """Return processor, cores, memory (GiB), system and versions, JSON-able."""
        return {
            "processor": self.processor(),
            "cores": self.cores(),
            "memory_gib": round(self.memory_bytes() / 2**30, 1),
            "system": " ".join(self.system()),
            "versions": self.versions(),
        }


machine = Machine()
"""The machine that this process runs on."""
