"""Resources of a running service: memory, threads and file handles by the role of its processes,
and shared memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from backend.launcher.processes import command_line
from tests.server.harness import Service

ROLES = {
    "backend.cli": "launcher",
    "backend.engine_process": "engine",
    "/ensemble/": "stub ensemble",
    "/tensorrt_llm_bls/": "stub tensorrt_llm_bls",
    "/tensorrt_llm/": "stub tensorrt_llm",
    "backend.openai_frontend": "front end",
    "/spindle/": "stub spindle",
    "bin/tritonserver": "tritonserver",
    "VLLM::EngineCore": "vLLM's core",
    "VLLM::Worker": "vLLM's worker",
}
ROOM = {"rss_mib": (1.2, 24.0), "threads": (1.2, 8.0), "handles": (1.2, 16.0), "mib": (1.2, 4.0)}
"""By how much the last third may exceed the first, factor and addend, before it counts as
growth.
"""


def role_of(pid: int) -> str | None:
    """Return the role of a process by its command line; None for any other process."""
    line = " ".join(command_line(pid))
    return next((role for word, role in ROLES.items() if word in line), None)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment; ``at_s`` counts from the start of the run."""

    at_s: float
    role: str
    pid: int
    rss_mib: float
    threads: int
    handles: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """All regions in /dev/shm of one service at one moment."""

    at_s: float
    regions: int
    mib: float


class Watch:
    """Samples a service's processes and shared memory."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = time.perf_counter()
        self.samples: list[Sample] = []
        self.shared: list[SharedMemory] = []

    def sample(self) -> None:
        """Take one sample of everything."""
        at_s = round(time.perf_counter() - self._started_s, 1)
        for pid in [self._service.process.pid, *self._service.tree()]:
            role = role_of(pid)
            try:
                status = dict(
                    line.split(":\t", 1)
                    for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                    if ":\t" in line
                )
                handles = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue  # it has just ended
            if role is not None and "VmRSS" in status:
                rss_mib = round(int(status["VmRSS"].split()[0]) / 1024, 1)
                self.samples.append(
                    Sample(at_s, role, pid, rss_mib, int(status["Threads"]), handles)
                )
        sizes = [path.stat().st_size for path in self._service.shared_memory() if path.exists()]
        self.shared.append(SharedMemory(at_s, len(sizes), round(sum(sizes) / 2**20, 2)))

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return medians of the first and the last third of the run by role and quantity, and a
        sentence for each that grew.
        """
        end_s = self.shared[-1].at_s
        rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
        all_samples: list[Sample | SharedMemory] = [*self.samples, *self.shared]
        for sample in all_samples:
            figures = asdict(sample)
            at_s, role = figures.pop("at_s"), figures.pop("role", "shared memory")
            figures.pop("pid", None)
            for name, value in figures.items():
                rows.setdefault(role, {}).setdefault(name, []).append((at_s, value))
        summary: dict[str, Any] = {}
        growth = []
        for role, quantities in rows.items():
            for name, values in quantities.items():
                first = [value for at_s, value in values if 0.05 * end_s <= at_s <= end_s / 3]
                last = [value for at_s, value in values if at_s >= end_s * 2 / 3]
                if not first or not last:
                    continue
                thirds = {
                    "first_third": median(first),
                    "last_third": median(last),
                    "most": max(value for _, value in values),
                }
                summary.setdefault(role, {})[name] = thirds
                factor, addend = ROOM.get(name, ROOM["handles"])
                if thirds["last_third"] > factor * thirds["first_third"] + addend:
                    growth.append(
                        f"{role}: {name} grew from {thirds['first_third']} to "
                        f"{thirds['last_third']}"
                    )
        return summary, growth
