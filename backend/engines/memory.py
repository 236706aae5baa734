"""Whether a deployment fits into memory: planned from its configuration before anything is loaded,
and refused with the numbers if not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from backend.checked_settings import ConfigError
from backend.config import LEAST_KV_TOKENS, ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.port import Footprint
from backend.engines.registry import module_of
from backend.machine import Machine, machine
from backend.sequence import BLOCK_TOKENS

KV_SHARE = 0.9
"""Share of a GPU's free memory for weights, passes and KV together."""
PROCESS_BYTES = 400 << 20
"""Memory of the process besides its engines: Python, the engines' libraries, the tokenizer, the
requests.
"""


def plan(config: ServingConfig, folders: Mapping[str, Path]) -> dict[str, Footprint]:
    """Return the footprints of the engines that run a model (``folders``: their checkpoints by
    name). Raises CheckpointError.
    """
    return {
        engine.name: module_of(engine).footprint(engine, config, folders[engine.name])
        for engine in config.engines
        if engine.name in folders
    }


def kv_tokens_that_fit(config: ServingConfig, folders: Mapping[str, Path], free: int) -> int:
    """Return for how many tokens there is KV in ``KV_SHARE`` of the bytes that are free on the
    target's device, a multiple of the block: at most those of as many whole contexts as requests.
    """
    limits, device = config.limits, config.target.device

    def bytes_for(tokens: int) -> int:
        sized = replace(config, limits=replace(limits, kv_cache_tokens=tokens))
        return sum(f.total for f in plan(sized, folders).values() if f.device == device)

    most = limits.max_active_requests * (limits.max_context_tokens + config.policy.k_max + 1)
    least_bytes = bytes_for(LEAST_KV_TOKENS)
    token_bytes = (bytes_for(2 * LEAST_KV_TOKENS) - least_bytes) / LEAST_KV_TOKENS
    fitting = LEAST_KV_TOKENS + int((KV_SHARE * free - least_bytes) / token_bytes)
    return max(min(fitting, most) // BLOCK_TOKENS * BLOCK_TOKENS, LEAST_KV_TOKENS)


def process_bytes(config: ServingConfig) -> int:
    """Return what the process takes besides its engines, with what drafts remember, and the logits
    that requests keep until they are sent, and their copy then.
    """
    remembered = (draft.remembered_tokens * draft.kind.token_bytes for draft in config.drafts)
    return PROCESS_BYTES + sum(remembered) + 2 * config.limits.max_logits_bytes


def check(
    footprints: Mapping[str, Footprint],
    available: Mapping[str, int],
    process_bytes: int = PROCESS_BYTES,
) -> str:
    """Return the plan in a line; ``available`` is the bytes on each device, ``process_bytes`` the
    host's share besides the engines.

    Raises ConfigError with every number where they are too few.
    """
    lines = []
    for device, free in available.items():
        parts = {
            name: footprint for name, footprint in footprints.items() if footprint.device == device
        }
        process = process_bytes if device == "cpu" else 0
        needed = process + sum(footprint.total for footprint in parts.values())
        numbers = [
            f"{name} {_gib(f.weights)} weights + {_gib(f.kv)} KV + {_gib(f.passes)} passes"
            for name, f in parts.items()
        ]
        line = (
            f"{device} has {_gib(free)} GiB and {_gib(needed)} are needed "
            f"({', '.join(numbers)}, process {_gib(process)})"
        )
        if needed > free:
            raise ConfigError(
                f"not enough memory: {line}; lower limits.kv_cache_tokens (KV), "
                f"limits.max_active_requests or policy.k_max (passes), "
                "drafts[].remembered_tokens (process), "
                "or leave out a draft"
            )
        lines.append(line)
    return "memory: " + "; ".join(lines)


def available_bytes(engine: EngineConfig, machine: Machine = machine) -> int:
    """Return the memory that is free for an engine on its device."""
    return host_bytes() if engine.device == "cpu" else machine.free_gpu_bytes(engine.device)


def host_bytes(root: Path = Path("/")) -> int:
    """Return what Linux can still give this process: what the machine has, or what the tightest
    control group (v1 or v2) leaves.
    """
    meminfo = dict(
        line.split(":") for line in (root / "proc/meminfo").read_text("utf-8").splitlines()
    )
    return min([int(meminfo["MemAvailable"].split()[0]) << 10, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield what each control group above this process leaves: its limit less what it uses, file
    pages that can be dropped apart.
    """
    mounted = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names, top = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
                mounted / "memory",
            )
        elif not controllers:
            names, top = ("memory.max", "memory.current", "inactive_file"), mounted
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / names[0]).exists():
                limit = (folder / names[0]).read_text("utf-8").strip()
                stat = dict(
                    item.split()
                    for item in (folder / "memory.stat").read_text("utf-8").splitlines()
                )
                if limit != "max":
                    yield (
                        int(limit)
                        - int((folder / names[1]).read_text("utf-8"))
                        + int(stat.get(names[2], 0))
                    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
