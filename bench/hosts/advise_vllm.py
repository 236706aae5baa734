"""``spindle advise`` on vLLM's CPU build: cells that were left out against their prediction, and
the proof run, by processor time and by clock.

    python -m bench.hosts.advise_vllm tiny --python .venv-vllm/bin/python --out docs/results/...
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backend.advise.advice import advise
from backend.advise.campaign import CampaignSettings, ProbedServer, StartedServers
from backend.advise.goodput import PLAIN, Goodput, LoadRange
from backend.advise.load import Cell, Client
from backend.advise.servers import running
from backend.advise.times import StepLoad
from backend.advise.verify import AdviceFile, Proof, measure_arm
from bench import records
from engines_build import vllm_wheel
from policy.simulation.statistics import abba

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = ROOT / "engines_build" / "drafts"
LONGEST, NOW = 6, 5
MEASURED = (0, 3, 6)
"""The lengths that advice is made from; the others are left out of it."""
_NAMES = ("orders", "clients", "payments", "products", "flights", "books", "rooms", "doctors")
_TOPICS = ("bread", "rain", "trains", "music", "gardens", "winter", "maps", "tea")


def bodies(kind: str) -> list[dict[str, Any]]:
    """Return made-up requests: SQL for the tiny family, text to be repeated for n-grams."""
    common = {"model": "m", "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    if kind == "tiny":
        prompts = [
            f"CREATE TABLE {name} (id INT, name TEXT, {other}_id INT);\nSELECT "
            for name in _NAMES
            for other in _NAMES[:4]
        ]
        return [common | {"prompt": prompt} for prompt in prompts]
    texts = [
        f"A note on {topic}: {topic} matters to many people. Some write about {topic} and {other}, "
        f"others only about {other}. Repeat this note word for word, then add a sentence."
        for topic in _TOPICS
        for other in _TOPICS[:4]
    ]
    return [common | {"messages": [{"role": "user", "content": text}]} for text in texts]


def commands(kind: str, python: str, smollm2: Path) -> tuple[str, dict[str, Any]]:
    """Return the command of a server, ``{spec}`` in it, and the speculation."""
    model = DRAFTS / "tiny-target" if kind == "tiny" else smollm2
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", "m", "--max-model-len", "512", "--max-num-seqs", "16"]
    words += ["--dtype", "float32" if kind == "tiny" else "bfloat16", "--enforce-eager"]
    spec: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if kind == "tiny":
        spec = {"method": "draft_model", "model": str(DRAFTS / "tiny-0.9m")}
    return f"{shlex.join(words)} --port {{port}} {{spec}}", spec


def left_out(cells: list[Cell], *, by_cpu: bool) -> list[dict[str, Any]]:
    """Return predicted over measured of the lengths that were not used, cell by cell."""
    fitted_cells = [cell for cell in cells if not cell.loaded or cell.length in MEASURED]
    goodput = Goodput.fit(fitted_cells, by_cpu=by_cpu)
    rows = []
    keys = sorted({(c.length, c.in_flight) for c in cells if c.loaded} - _keys(fitted_cells))
    for length, n in keys:
        out = [c for c in cells if c.loaded and (c.length, c.in_flight) == (length, n)]
        measured = np.array([c.seconds(by_cpu=by_cpu) for c in out])
        ratios = goodput.times.seconds(StepLoad.of(out)) / measured
        tokens = sum(c.emitted * c.row_steps for c in out) / sum(c.row_steps for c in out)
        each = np.array([c.window["generated"] / _seconds(c, by_cpu=by_cpu) for c in out])
        speed = float(goodput.tokens_per_s(length, np.array([n]))[0] / np.exp(np.log(each).mean()))
        rows.append(
            {
                "length": length,
                "in_flight": n,
                "seconds": round(float(np.exp(np.log(ratios).mean())), 4),
                "tokens": round(goodput.expected[length].emitted / tokens, 4),
                "speed": round(speed, 4),
                "blocks_apart": round(float(measured.max() / measured.min()), 4),
            }
        )
    return rows


def _keys(cells: list[Cell]) -> set[tuple[int, int]]:
    return {(cell.length, cell.in_flight) for cell in cells if cell.loaded}


def _seconds(cell: Cell, *, by_cpu: bool) -> float:
    return cell.window.cpu_s if by_cpu else cell.window.wall_s


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far predictions are off, over cells."""
    result: dict[str, Any] = {"cells": len(rows)}
    for name, aim in (("seconds", 0.10), ("tokens", 0.03), ("speed", 0.10)):
        off = np.abs(np.array([row[name] for row in rows]) - 1)
        result[name] = {
            "median_off": round(float(np.median(off)), 4),
            "most_off": round(float(off.max()), 4),
            f"within_{aim:.0%}": int((off <= aim).sum()),
        }
    return result


def prove(
    native: StartedServers,
    plain: Client,
    table: list[LoadRange],  # the best one with a draft, also where none is advised
    blocks: int,
    deadline_s: float,
    stack: ExitStack,
) -> dict[str, Any]:
    """Run plain, before and after in turn, until the deadline at most; returns both proofs."""
    native.settings.blocks = 1
    advised = AdviceFile(table, True, NOW, dict(native.spec), "vllm")
    arms, clients = advised.arms(), {"plain": plain}
    for name in ("before", "after"):
        clients[name] = stack.enter_context(native.serve(arms[name], LONGEST))
        native.warm(clients[name])
    proofs = {"cpu": Proof(advised), "wall": Proof(advised)}
    block = 0
    while block < blocks and time.monotonic() < deadline_s:
        for name in abba([*arms], block):
            measure_arm(proofs, native, clients[name], name, block)
        block += 1
    for clock, proof in proofs.items():
        native.say(f"{clock}: {proof.text()}")
    return {
        "proof_of": [[*one] for one in table],
        "proof_blocks": block,
        "proof": {clock: proof.to_dict() for clock, proof in proofs.items()},
    }


def main() -> None:
    """Measure, predict, prove, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("tiny", "smollm2"))
    parser.add_argument("--python", required=True, help="of an environment with vLLM")
    parser.add_argument("--smollm2", type=Path, default=Path())
    parser.add_argument("--loads", default="1,4,8")
    parser.add_argument("--blocks", type=int, default=2, help="of the grid")
    parser.add_argument("--proof-blocks", type=int, default=5, help="0: no proof")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--limit-s", type=float, default=280.0, help="for everything")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started_s, say = time.monotonic(), partial(print, flush=True)
    loads = [int(n) for n in options.loads.split(",")]
    command, spec = commands(options.kind, options.python, options.smollm2)
    settings = CampaignSettings(
        bodies(options.kind), loads, options.blocks, most_tokens=options.tokens
    )
    with ExitStack() as stack:
        wheel = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        vllm_wheel.write_tree(wheel)
        os.environ |= {"PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        table = [[1, 1024, LONGEST]]
        full = {
            **spec,
            "num_speculative_tokens": LONGEST,
            "num_speculative_tokens_per_batch_size": table,
        }
        probe = ["--scheduler-cls", "spindle_vllm.ProbeScheduler", "--no-async-scheduling"]
        probe += ["--per-request-spec-decode-metrics", "detailed"]
        probe += ["--speculative-config", json.dumps(full)]
        server = stack.enter_context(running(command, probe, Client, 120))
        plain = stack.enter_context(running(command, ["--no-async-scheduling"], Client, 120))
        say(f"started after {time.monotonic() - started_s:.0f} s")
        probed = ProbedServer(settings, say, server=server, plain=plain)
        probed.measure([PLAIN, *range(LONGEST + 1)], LONGEST)
        cells = probed.cells
        say(f"measured after {time.monotonic() - started_s:.0f} s")
        fitted_cells = [cell for cell in cells if not cell.loaded or cell.length in MEASURED]
        advices = {
            clock: advise(fitted_cells, NOW, by_cpu=clock == "cpu") for clock in ("cpu", "wall")
        }
        record: dict[str, Any] = {
            "engine": f"vLLM {probed.version}, CPU build, one thread",
            "requests": f"{len(settings.bodies)} made-up bodies, greedy, {options.tokens} tokens",
            "now": NOW,
            "left_out": {},
            "advice": {clock: one.to_dict() for clock, one in advices.items()},
        }
        for clock in advices:
            rows = left_out(cells, by_cpu=clock == "cpu")
            record["left_out"][clock] = {"summary": summary(rows), "rows": rows}
        record["cells"] = advise(cells, NOW).to_dict()["cells"]
        records.write(options.out, record)
        if options.proof_blocks:
            deadline_s = started_s + options.limit_s
            advised = advices["cpu"].table_if_speculating
            native = StartedServers(settings, say, engine="vllm", command=command, spec=spec)
            record |= prove(native, plain, advised, options.proof_blocks, deadline_s, stack)
        record["wall_s"] = round(time.monotonic() - started_s, 1)
    records.write(options.out, record)
    say(json.dumps({clock: one["summary"] for clock, one in record["left_out"].items()}))


if __name__ == "__main__":
    main()
