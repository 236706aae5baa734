"""Measure the latency tables of TensorRT-LLM engines on their GPUs: ``python -m
engines_build.trtllm.measure_executor --config serving.json``.

A turn is timed as it is served: a request whose prompt is found in the KV cache but for the
part of a block that is computed again, the executor's queue, the pass, and the answer. The tables
lie next to the engines.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from backend.config import EngineConfig, ServingConfig, load_config
from backend.engines.latency_cases import Case, latency_cases
from backend.engines.port import Turn
from backend.engines.registry import Service
from backend.engines.trtllm.deployment import TABLE_FILE, make, trtllm_engines
from backend.engines.trtllm.engine import TrtllmEngine
from backend.machine import machine
from backend.model_folders import model_path
from backend.sequence import BLOCK_TOKENS, Sequence
from backend.storage import cache
from engines_build.measure import tabulate
from engines_build.timing import Rig, interleave
from policy.latency import LatencyTable, Provenance

BUDGET_S = 60.0
"""Time for the rounds of one engine."""


class FilledEngine:
    """An engine for the rig: a sequence is declared seen by running it once, which leaves its KV to
    be found.
    """

    def __init__(self, engine: TrtllmEngine) -> None:
        self._engine = engine

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """Run the first tokens, untimed. Raises RuntimeError when that fails."""
        head = Sequence(sequence.id, sequence.tokens[:tokens], tokens, sequence.sampling)
        self._engine.submit([Turn(head, tokens)])
        while not (done := self._engine.poll(1.0)):
            pass
        if done[0].error is not None:
            raise RuntimeError(f"engine {self._engine.name!r}: {done[0].error}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def measure_executors(
    config: ServingConfig, *, budget_s: float = BUDGET_S, most: int = 15
) -> dict[str, LatencyTable]:
    """Measure every engine of a deployment with all of them loaded, write their tables, and return
    them by name.
    """
    engines: dict[str, Any] = {
        engine.name: make(engine, Service(config, 1, model_path))
        for engine in trtllm_engines(config)
    }
    rng, tables = random.Random(0), {}
    try:
        for engine in trtllm_engines(config):
            made = engines[engine.name]
            cases = [
                case
                for case in latency_cases(target=engine is config.target)
                if _fits(case, made, config)
            ]
            rig = Rig(FilledEngine(made), rng)
            work = [lambda rig=rig, case=case: rig.time(case) for case in cases]
            samples = interleave(work, budget_s=budget_s, rng=rng, report=_silent, most=most)
            table = tabulate(
                engine.name,
                cases,
                [min(times) for times in samples],
                _provenance(engine),
            )
            file = model_path(engine) / TABLE_FILE
            cache.publish_file(file, json.dumps(table.to_dict(), indent=1) + "\n")
            tables[engine.name] = table
            print(f"{file}: {len(cases)} cells", flush=True)
    finally:
        for made in engines.values():
            made.close()
    return tables


def _silent(_done_s: float, _expected_s: float) -> None:
    """Say nothing of how far it is."""


def _fits(case: Case, engine: TrtllmEngine, config: ServingConfig) -> bool:
    """Whether an engine can be asked for a case; a chunk without tokens to run is no work of its
    own there.
    """
    longest = case.context + case.new + case.length + case.run
    enough = (
        case.rows <= config.limits.max_active_requests
        and longest <= engine.limits.max_context_tokens
    )
    enough = (
        enough and case.rows * longest <= engine.limits.kv_blocks * BLOCK_TOKENS
    )  # within the token budget
    return enough and case.run > 0 and case.length <= engine.limits.max_draft_tokens


def _provenance(engine: EngineConfig) -> Provenance:
    import torch

    device = torch.cuda.get_device_name(engine.gpus[0]) if torch.cuda.is_available() else "none"
    manifest = json.loads((model_path(engine) / "config.json").read_text("utf-8"))
    return Provenance(
        machine=machine.processor(),
        device=f"{device} x{len(engine.gpus)}",
        model=engine.model,
        model_hash=str(manifest.get("version", "")),
        dtype=str(manifest["pretrained_config"].get("dtype", "")),
        threads=1,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        torch_version=torch.__version__,
    )


def main() -> None:
    """Measure the engines of one configuration, whether or not tables are there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="the serving.json that engines_build.build has written",
    )
    args = parser.parse_args()
    try:
        measure_executors(load_config(args.config))
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
