"""A machine with the facts that a test names; whatever it does not name is the real one's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backend.machine import Machine

BF16_FLAGS = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16"
"""Flags of a processor that multiplies bf16."""
AVX2_FLAGS = "avx2 fma f16c"
"""Flags of a processor that does not."""
H100 = "0, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0"
V100 = "1, Tesla V100-SXM2-16GB, 16384 MiB, 580.65.06, 7.0"
"""Facts that nvidia-smi reports of a GPU."""
CUDA_PACKAGES = {"torch": "2.13.0", "triton": "3.6.0"}


@dataclass
class FakeMachine(Machine):
    """A machine made of facts, for code that asks about the one it runs on."""

    flags: str | None = None
    """Flags of the processor, named "A Processor"; with "" there is no /proc/cpuinfo."""
    core_count: int | None = None
    os_and_cpu: tuple[str, str] | None = None
    glibc_version: str | None = None
    has_python_library: bool = True
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Versions by package; None: not installed."""
    gpu_lines: list[str] | None = None
    """Lines of nvidia-smi, as ``H100`` is one."""
    cuda: str | None = None
    """The CUDA that torch is built for, and can use; empty: a CPU build."""
    driver_is_new: bool = True
    gpu_bytes: int | None = None
    """Free memory of every CUDA device."""
    """All that are installed."""
    device: str | None = None
    """Name of every CUDA device."""
    folder: Path | None = None
    """Temporary files and shared memory."""
    disk_bytes: int | None = None
    writable: bool | None = None
    runs_no_programs: bool = False
    """Whether folders are mounted noexec."""
    most_open_files: int | None = None

    def cpu_info(self) -> str:
        if self.flags is None:
            return super().cpu_info()
        core = f"model\t\t: 1\nmodel name\t: A Processor\nflags\t\t: {self.flags}\n\n"
        return f"processor\t: 0\n{core}processor\t: 1\n" if self.flags else ""

    def cores(self) -> int:
        return super().cores() if self.core_count is None else self.core_count

    def system(self) -> tuple[str, str]:
        return self.os_and_cpu or super().system()

    def glibc(self) -> str:
        return self.glibc_version or super().glibc()

    def library_folder(self, name: str) -> Path | None:
        return super().library_folder(name) if self.has_python_library else None

    def package_version(self, name: str) -> str | None:
        return self.packages[name] if name in self.packages else super().package_version(name)

    def nvidia_smi(self) -> str:
        return super().nvidia_smi() if self.gpu_lines is None else "\n".join(self.gpu_lines)

    def device_name(self, device: str) -> str:
        return super().device_name(device) if self.device is None else self.device

    def cuda_build(self) -> str:
        return super().cuda_build() if self.cuda is None else self.cuda

    def cuda_works(self) -> bool:
        return super().cuda_works() if self.cuda is None else self.driver_is_new

    def free_gpu_bytes(self, device: str) -> int:
        return super().free_gpu_bytes(device) if self.gpu_bytes is None else self.gpu_bytes

    def temporary_folder(self) -> Path:
        return self.folder or super().temporary_folder()

    def shared_memory_folder(self) -> Path:
        return self.folder or super().shared_memory_folder()

    def free_disk_bytes(self, folder: Path) -> int:
        return super().free_disk_bytes(folder) if self.disk_bytes is None else self.disk_bytes

    def is_noexec(self, folder: Path) -> bool:
        return self.runs_no_programs or super().is_noexec(folder)

    def open_files(self) -> tuple[int, int]:
        most = self.most_open_files
        return super().open_files() if most is None else (most, most)

    def can_write(self, folder: Path) -> bool:
        return super().can_write(folder) if self.writable is None else self.writable
