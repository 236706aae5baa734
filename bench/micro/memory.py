"""The memory plan against what the process takes: ``python -m bench.micro.memory --config
FILE --out FILE``.

The deployment is built in this process, every KV block is touched (memory that is only reserved is
not resident), and a full batch is served: as many requests as may be active, sampled with top-p,
each speculating with every draft in turn as far as it may. The peak of each stage is the kernel's
(``VmHWM``, reset before it); what was planned is the line that the start logs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from backend import machine
from backend.app import App, build
from backend.config import load_config
from backend.engines import memory
from backend.engines.stepping.engine import StepEngine
from backend.model_folders import model_path
from backend.request import GenerationRequest
from backend.storage.tables import timed_engines
from bench import workloads
from bench.in_process import generate
from policy import RandomChoice

MIB = 2**20


def resident() -> dict[str, float]:
    """Return what is resident now and was at most since the last call, in MiB, and start counting
    anew.
    """
    status = Path("/proc/self/status").read_text("utf-8")
    now, peak = (
        int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("VmRSS", "VmHWM")
    )  # type: ignore[index]
    Path("/proc/self/clear_refs").write_text("5")
    return {"rss_mib": round(now, 1), "peak_mib": round(peak, 1)}


def touch_kv(app: App) -> None:
    """Write every page of the KV pools."""
    for engine in (app.target, *app.drafts):
        if isinstance(engine, StepEngine):
            model: Any = engine._model
            with torch.inference_mode():
                (model.pool if hasattr(model, "pool") else model._pool).fill_(0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every stage and write the record."""
    command = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--active", type=int, default=64, help="limits.max_active_requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(command)
    config = load_config(options.config)
    limits = replace(config.limits, max_active_requests=options.active)
    config = replace(
        config, limits=limits, policy=replace(config.policy, kind="none", keep_learned=False)
    )
    footprints = memory.plan(
        config, {engine.name: model_path(engine) for engine in timed_engines(config)}
    )
    stages = {"imported": resident()}
    app = build(config, {})
    stages["loaded"] = resident()
    touch_kv(app)
    stages["KV touched"] = resident()
    messages, folder = (
        workloads.load(workloads.MIX, options.active, options.seed).messages,
        model_path(config.target),
    )
    prompts = [workloads.render(messages[i % len(messages)], folder) for i in range(options.active)]
    requests = [
        GenerationRequest(prompt, options.max_tokens, temperature=0.8, top_p=0.9, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    generate(app, requests, options.active, RandomChoice())
    stages["served"] = resident()
    planned = sum(footprint.total for footprint in footprints.values()) + memory.process_bytes(
        config
    )
    record: dict[str, Any] = {
        "benchmark": "planned and resident memory",
        "command": ["python", "-m", "bench.micro.memory", *command],
        "machine": machine.describe(),
        "seed": options.seed,
        "planned_mib": round(planned / MIB, 1),
        "process_mib": memory.process_bytes(config) / MIB,
        "engines": {
            name: {
                part: round(size / MIB, 1) for part, size in asdict(f).items() if part != "device"
            }
            for name, f in footprints.items()
        },
        "measured": stages,
    }
    print(json.dumps(record, indent=1))
    options.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
