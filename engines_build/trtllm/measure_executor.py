"""Measure the latency tables of TensorRT-LLM engines on their GPUs: ``python -m
engines_build.trtllm.measure_executor --config serving.json``.

What is timed is a turn as it is served: a request whose prompt is found in the KV cache but for the
part of a block that is computed again, the executor's queue, the pass, and the answer. The tables
lie beside the engines.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from backend.config import EngineConfig, ServingConfig, load_config
from backend.engines.port import Turn
from backend.engines.registry import Service
from backend.engines.trtllm.deployment import LATENCY_FILE, make, trtllm_engines
from backend.engines.trtllm.engine import ITERATIONS_IN_FLIGHT, TrtllmEngine
from backend.engines.trtllm.folder import read_engine_folder
from backend.machine import machine
from backend.model_folders import model_path
from backend.sequence import BLOCK_TOKENS, Sequence
from backend.storage import cache
from engines_build.measure import BASE_CONTEXT, draft_cases, lower_quartile, tabulate, target_cases
from engines_build.timing import Case, Rig, interleave
from policy.latency import LatencyTable, Provenance

BUDGET_S = 60.0
"""Time for the rounds of one engine."""

BUDGET_FILE = "token_budget.json"
"""Beside the table: what a verification takes within the engine's token budget, and past it."""

RUN_TOKENS = 5
"""Tokens of the run that a turn of one is compared with."""


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
                for case in (target_cases() if engine is config.target else draft_cases())
                if _fits(case, made, config)
            ]
            rig = Rig(FilledEngine(made), rng)
            work = [lambda rig=rig, case=case: rig.time(case) for case in cases]
            samples = interleave(work, budget_s=budget_s, rng=rng, report=_silent, most=most)
            table = tabulate(
                engine.name,
                cases,
                [lower_quartile(times) for times in samples],
                _provenance(engine),
            )
            if engine is config.target:
                table = replace(table, turn_s=_turn_s(rig, budget_s, rng, most))
                _write_budget(rig, engine, made, config)
            cache.publish_file(
                model_path(engine) / LATENCY_FILE, json.dumps(table.to_dict(), indent=1) + "\n"
            )
            tables[engine.name] = table
            print(f"{model_path(engine) / LATENCY_FILE}: {len(cases)} cells", flush=True)
    finally:
        for made in engines.values():
            made.close()
    return tables


def _silent(_done_s: float, _expected_s: float) -> None:
    """Say nothing of how far it is."""


def _turn_s(rig: Rig, budget_s: float, rng: random.Random, most: int) -> float:
    """Return what a turn of one row takes beside its iterations: what a turn of one token does,
    less a token's part of a longer one.
    """
    cases = [Case(1, BASE_CONTEXT, run=tokens) for tokens in (1, RUN_TOKENS)]
    work = [lambda case=case: rig.time(case) for case in cases]
    samples = interleave(work, budget_s=budget_s, rng=rng, report=_silent, most=most)
    one_s, run_s = (lower_quartile(times) for times in samples)
    return max(0.0, one_s - (run_s - one_s) / (RUN_TOKENS - 1))


def past_budget(
    rig: Rig, max_num_tokens: int, rows: int, most_tokens: int
) -> dict[str, list[float]] | None:
    """Time a verification of half of ``rows`` texts that fill an iteration's budget, and one of all
    of them, which is past it.

    Past it texts wait for the next iteration, and the loop reads times iteration by iteration: the
    table has no such cell, which a line through the others could not follow. None where all texts
    of ``most_tokens`` fit together.
    """
    text = max_num_tokens // max(1, rows // 2)
    if rows < 2 or text > most_tokens:
        return None
    cases = [Case(count, text - 2, length=1) for count in (rows // 2, rows)]
    return {
        "text_tokens": [case.rows * text for case in cases],
        "seconds": [rig.time(case) for case in cases],
    }


def _write_budget(
    rig: Rig, engine: EngineConfig, made: TrtllmEngine, config: ServingConfig
) -> None:
    budget = read_engine_folder(model_path(engine)).max_num_tokens
    found = past_budget(
        rig, budget, config.limits.max_active_requests, made.limits.max_context_tokens
    )
    if found is None:
        print(f"{engine.name}: all texts fit its token budget of {budget}", flush=True)
        return
    within_s, past_s = found["seconds"]
    cache.publish_file(
        model_path(engine) / BUDGET_FILE, json.dumps({"max_num_tokens": budget, **found}) + "\n"
    )
    print(
        f"{engine.name}: {past_s / within_s:.1f} times as long with twice the text of its token "
        f"budget of {budget}",
        flush=True,
    )


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
        enough
        and case.rows * longest * ITERATIONS_IN_FLIGHT <= engine.limits.kv_blocks * BLOCK_TOKENS
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
