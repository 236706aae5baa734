"""Policies on real passes of random weights whose acceptance is scripted, the same for all:
``python -m bench.cuda.scripted --out FILE``.

The target is an 8B on the CUDA engine with a turn of lookahead, the drafts are two heads that it
runs; ``bench.cuda.script`` says which of their nodes are right. Prompts are random and run. Graphs
are captured, latency tables are measured by the device's clock, and the adaptive policy serves each
load for a while before anything is timed; the record is written after every cell. ``--open 0.5
0.9`` adds open loops whose requests arrive as they come, at these shares of what ``none`` serves
with all places taken.

``--rehearse`` runs small shapes on a CPU in half a minute.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from backend.config import parse_config
from backend.engines.cuda.forward import Size
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.head.folder import HeadConfig
from backend.engines.head.in_target import HeadInTarget
from backend.engines.head.network import HeadNetwork
from backend.engines.latency_cases import Case
from backend.engines.port import Completion, Engine
from backend.ipc.process import spare_the_collector
from backend.machine import machine
from backend.ops.stats import Stats, StepStats
from backend.sequence import BLOCK_TOKENS
from backend.speculation.policy_factory import make_policy
from bench import records
from bench.cuda import PLANNER
from bench.cuda.random_models import SHAPES, DecoderShape, random_llama
from bench.cuda.request_loops import K_MAX, NEW_TOKENS, SEED, ClosedLoop, OpenLoop
from bench.cuda.script import Rates, ScriptedProposal, ScriptedSteps
from engines_build.measure import tabulate
from engines_build.timing import Rig, interleave
from policy.latency import LatencyCurve, LatencyTable, Provenance
from policy.loops.compiling import compile_all

TARGET, DRAFTS = "target", ("large", "small")
ACCEPTANCE = {"large": Rates(0.9, 0.65), "small": Rates(0.85, 0.4)}
"""How often a head's first node is right, at places that are not hard."""

HEADS = {"large": (14336, 32000), "small": (4096, 8192)}
"""Inner size and static rows of each head."""

PROMPT_TOKENS = 1000
LEARNING_S = 15.0
"""Seconds that the adaptive policy serves each load before it is timed."""

LOADS = (1, 8, 32, 64, 128)
LENGTHS = {"large": (1, 2, 4, 8), "small": (2, 4)}
"""Lengths of the fixed policies."""


@dataclass
class ScriptedRun:
    """One run: where, for how long, and what it has found so far."""

    out: Path
    device: str
    rehearse: bool
    end_s: float  # on ``time.monotonic``
    loads: Sequence[int]  # requests in flight
    arms: Sequence[str]  # of ``arms``
    shares: Sequence[float] = ()  # of the capacity, in open loops
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    @property
    def shape(self) -> DecoderShape:
        """The target's."""
        return SHAPES["tiny" if self.rehearse else "8b"]

    @property
    def places(self) -> int:
        """Requests that run at once."""
        return 4 if self.rehearse else max(LOADS)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return 40 if self.rehearse else PROMPT_TOKENS

    def keep(self) -> None:
        """Write what there is."""
        records.write(self.out, self.result)


class ScriptedEngine(LookaheadEngine):
    """An engine whose acceptance is scripted."""

    steps_type = ScriptedSteps

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.waited_s = 0.0
        """How long the host has waited for the device, in all."""
        self.verified_s: defaultdict[Size, list[float]] = defaultdict(list)
        """The device's seconds of verification by the size of a step without prompts."""
        wait = self._stream.wait

        def wait_timed(event: Any) -> None:
            begun_s = time.perf_counter()
            wait(event)
            self.waited_s += time.perf_counter() - begun_s

        self._stream.wait = wait_timed  # type: ignore[method-assign]

    def _collect(self, submission: Any) -> list[Completion]:
        completions = super()._collect(submission)
        if submission.launched is not None and not submission.chunks:
            self.verified_s[submission.launched.size].append(self.parts_s()["verify"])
        return completions


def engines_of(job: ScriptedRun) -> tuple[ScriptedEngine, list[HeadInTarget]]:
    """Make the target and its heads, of random weights."""
    shape, dtype = job.shape, torch.float32 if job.rehearse else torch.bfloat16
    taps = (1, shape.layers // 2, shape.layers)
    lm = random_llama(shape, job.device, dtype)
    active = job.places
    context = job.prompt_tokens + NEW_TOKENS + 4 * K_MAX
    engine = ScriptedEngine(
        TARGET,
        lm,
        sequences=active,
        vocab_size=shape.vocab,
        kv_blocks=active * (context // BLOCK_TOKENS + 2),
        max_context_tokens=context,
        max_draft_tokens=K_MAX,
        taps=taps,
        invariant=False,
    )
    heads = []
    for number, name in enumerate(DRAFTS):
        inner, rows = (64, 60) if job.rehearse else HEADS[name]
        network = HeadNetwork(HeadConfig(shape.vocab, shape.hidden, inner, taps, rows=rows))
        network = network.to(job.device, dtype).requires_grad_(requires_grad=False)
        token_ids = torch.arange(rows, device=job.device)
        heads.append(HeadInTarget(name, network, token_ids, max_draft_tokens=K_MAX))
        ScriptedProposal.rates[name] = number + 1, ACCEPTANCE[name]
    return engine, heads


def cases_of(job: ScriptedRun) -> dict[str, list[Case]]:
    """Return the cases that are measured of every engine."""
    context = job.prompt_tokens
    rows = (1, 4) if job.rehearse else (1, 2, 4, 8, 16, 32, 64, 128)
    lengths = (0, 4) if job.rehearse else (0, 1, 2, 4, 8)
    target = [
        Case(n, context, length=length) for n in rows for length in lengths if n * length <= 512
    ]
    target += [Case(n, context // 2) for n in rows[-2:]]
    return {TARGET: target} | {name: [Case(n, context, run=4) for n in rows] for name in DRAFTS}


def tables(
    job: ScriptedRun, engine: ScriptedEngine, heads: list[HeadInTarget]
) -> dict[str, LatencyTable]:
    """Measure the tables of all engines, interleaved."""
    rig, cases, by_name = (
        Rig(engine, random.Random(SEED)),
        cases_of(job),
        dict(zip(DRAFTS, heads, strict=True)),
    )
    work = [(name, case) for name in cases for case in cases[name]]

    def seconds(name: str, case: Case) -> float:
        if name == TARGET:
            return rig.time(case)
        return rig.time_in_target(by_name[name], case)

    started = time.monotonic()
    samples = interleave(
        [lambda name=name, case=case: seconds(name, case) for name, case in work],  # type: ignore[misc]
        budget_s=1.0 if job.rehearse else 0.1 * job.left_s,
        rng=random.Random(SEED),
        report=lambda _elapsed_s, _expected_s: None,
    )
    seconds_of = dict(zip(work, samples, strict=True))
    curves = {
        name: tabulate(
            name,
            its_cases,
            [min(seconds_of[name, case]) for case in its_cases],
            provenance(job),
            engine.limits.widths if name == TARGET else (),
        )
        for name, its_cases in cases.items()
    }
    job.result["tables"] = {name: table.to_dict() for name, table in curves.items()}
    job.result["tables_s"] = round(time.monotonic() - started, 1)
    job.keep()
    return curves


def provenance(job: ScriptedRun) -> Provenance:
    """Return where a table comes from."""
    device = torch.cuda.get_device_name() if job.device == "cuda" else job.device
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(
        machine.processor(), device, "random weights", "", "bf16", 1, date, str(torch.__version__)
    )


def arms() -> dict[str, dict[str, Any]]:
    """Return the policies by name, as ``serving.json`` has them."""
    fixed: dict[str, dict[str, Any]] = {
        f"{draft} {k}": {"kind": "fixed", "draft": draft, "length": k}
        for draft, lengths in LENGTHS.items()
        for k in lengths
    }
    others: dict[str, dict[str, Any]] = {
        "SmartSpec": {"kind": "smartspec", "draft": "large"},
        "SPIN's selection": {
            "kind": "bench.baselines.spin.SpinSelection",
            "options": {"length": 4},
        },
        "adaptive verification": {
            "kind": "bench.baselines.verification.AdaptiveVerification",
            "options": {"draft": "large", "length": 8},
        },
    }
    return {"none": {"kind": "none"}} | fixed | others | {"adaptive": {"kind": "adaptive"}}


@dataclass(frozen=True)
class CellLoad:
    """The load of a cell: requests in flight, or a share of the capacity in an open loop."""

    in_flight: int = 0
    share: float = 0.0

    @property
    def label(self) -> str:
        """Its name in the summary."""
        return f"{self.share:g} of the capacity" if self.share else str(self.in_flight)


def policies(
    job: ScriptedRun,
    engine: ScriptedEngine,
    heads: list[HeadInTarget],
    latency: dict[str, LatencyTable],
) -> None:
    """Let the adaptive policy learn; then serve every load with every policy, in a new order in
    each of two rounds; then open loops, whose shares are of what ``none`` served at the highest
    load.
    """
    rng, rounds = random.Random(SEED), 1 if job.rehearse else 2
    closed, opened = [CellLoad(n) for n in job.loads], [CellLoad(share=x) for x in job.shares]
    learning_s = 0.1 if job.rehearse else LEARNING_S
    learning = [(arm, load) for load in closed for arm in job.arms if arm == "adaptive"]
    spans = rounds * len([*closed, *opened]) * len(job.arms)
    each_s = max(0.0, 0.95 * job.left_s - learning_s * len(learning)) / spans
    warm_s, measured_s = (0.05, 0.2) if job.rehearse else (0.25 * each_s, 0.75 * each_s)
    loops: dict[tuple[str, str], ClosedLoop] = {}
    job.result |= {
        "acceptance": {name: asdict(rates) for name, rates in ACCEPTANCE.items()},
        "tokens": [job.prompt_tokens, NEW_TOKENS],
        "warm_s": round(warm_s, 3),
        "learning_s": round(learning_s, 3),
        "measured_s": round(measured_s, 3),
        "cells": [],
    }
    curve = LatencyCurve.fit(latency[TARGET])
    for arm, load in learning:
        loop = loop_of(job, engine, heads, arm, load, latency)
        loop.run(learning_s)
        loop.end()
        loops[arm, load.label] = loop
    for loads in (closed, opened):
        cells = [(arm, load) for load in loads for arm in job.arms]
        for round_ in range(rounds):
            for arm, load in rng.sample(cells, len(cells)):
                loop = loops.get((arm, load.label)) or loop_of(
                    job, engine, heads, arm, load, latency
                )
                cell = {"round": round_, "policy": arm, **asdict(load)}
                cell |= serve(engine, loop, load, (warm_s, measured_s), curve)
                job.result["cells"].append(cell)
                print(cell, flush=True)
                job.keep()
    job.result["summary"] = summary(job.result["cells"])


def capacity(job: ScriptedRun) -> float:
    """Return the requests a second that ``none`` served at the highest load."""
    rates = [
        cell["tokens_per_s"]
        for cell in job.result["cells"]
        if cell["policy"] == "none" and cell["in_flight"] == max(job.loads)
    ]
    return fmean(rates) / NEW_TOKENS


def loop_of(
    job: ScriptedRun,
    engine: ScriptedEngine,
    heads: list[HeadInTarget],
    arm: str,
    load: CellLoad,
    latency: dict[str, LatencyTable],
) -> ClosedLoop:
    """Return a loop of requests under a policy that has learned nothing."""
    config = parse_config(
        {
            "target": {"engine": "cuda", "name": TARGET, "model": "none", "lookahead": 1},
            "drafts": [{"engine": "head", "name": name, "model": "none"} for name in DRAFTS],
            "policy": arms()[arm] | {"k_max": K_MAX},
        }
    )
    drafts: list[Engine] = [*heads]
    policy = make_policy(config, drafts, latency, StepStats(Stats()))
    if load.share:
        rate = load.share * capacity(job)
        return OpenLoop(engine, drafts, policy, rate, job.prompt_tokens, job.places)
    return ClosedLoop(engine, drafts, policy, load.in_flight, job.prompt_tokens, job.places)


def serve(
    engine: ScriptedEngine,
    loop: ClosedLoop,
    load: CellLoad,
    spans_s: tuple[float, float],
    curve: LatencyCurve,
) -> dict[str, Any]:
    """Return what a loop serves in the second span."""
    loop.run(spans_s[0])
    waited_s, graphs = engine.waited_s, engine.graphs
    engine.verified_s.clear()
    seconds = loop.run(spans_s[1])
    waited_s, by_size = engine.waited_s - waited_s, sizes_of_steps(engine, curve)
    loop.end()
    steps = max(1, loop.steps)
    figures = {
        "tokens_per_s": round(loop.tokens / seconds, 2),
        "step_ms": round(1e3 * seconds / steps, 4),
        "device_ms": round(1e3 * loop.device_s / steps, 4),
        "graphs": engine.graphs - graphs,
        "host_ms": round(1e3 * (seconds - waited_s) / steps, 4),
        "verify_ms": by_size,
    }
    if load.share:
        ended = len(loop.latencies_s)
        figures |= {"requests_per_s": round(loop.load, 3), "ended": ended}
        return figures | {"latency_s": round(sum(loop.latencies_s) / ended, 4) if ended else 0.0}
    return figures | {"tokens_per_step_and_row": round(loop.tokens / steps / load.in_flight, 3)}


def sizes_of_steps(engine: ScriptedEngine, curve: LatencyCurve) -> dict[str, list[float]]:
    """Return by the size of steps without prompts how many there were, the device's mean
    milliseconds of their verification, and what the table measured at the start says of as many
    tokens without context.
    """
    return {
        f"{size.rows} rows, {size.tokens} tokens": [
            len(seconds),
            round(1e3 * fmean(seconds), 3),
            round(1e3 * curve.seconds(size.tokens, size.rows), 3),
        ]
        for size, seconds in sorted(engine.verified_s.items())
    }


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by load what adapting serves over every other policy and over the best fixed choice,
    by means over the rounds: tokens a second or, in open loops, the inverse of the mean latency.
    """
    speeds: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        load = CellLoad(cell["in_flight"], cell["share"])
        if load.share and not cell["ended"]:
            continue
        speed = 1 / cell["latency_s"] if load.share else cell["tokens_per_s"]
        speeds.setdefault(load.label, {}).setdefault(cell["policy"], []).append(speed)
    ratios = {}
    for load_name, of_arms in speeds.items():
        means = {arm: fmean(values) for arm, values in of_arms.items()}
        row: dict[str, Any] = {"speed": {arm: round(mean, 3) for arm, mean in means.items()}}
        fixed = {arm: mean for arm, mean in means.items() if arms()[arm]["kind"] == "fixed"}
        row["best_fixed"] = max(fixed, key=means.__getitem__, default="")
        if "adaptive" in means:
            others = {arm: mean for arm, mean in means.items() if arm != "adaptive"}
            row["adaptive_over"] = {
                arm: round(means["adaptive"] / mean, 3) for arm, mean in others.items()
            }
        ratios[load_name] = row
    return ratios


def main() -> None:
    """Measure tables, then policies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--loads", type=int, nargs="+", help=f"in flight, of {LOADS}")
    parser.add_argument("--policies", nargs="+", choices=[*arms()], default=[*arms()])
    parser.add_argument("--open", type=float, nargs="*", default=[], help="shares of the capacity")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args()
    loads = args.loads or ((1, 4) if args.rehearse else LOADS)
    loads = [min(load, 4) for load in loads] if args.rehearse else loads
    end_s = time.monotonic() + (30.0 if args.rehearse else args.seconds)
    device = "cpu" if args.rehearse else "cuda"
    if any(share <= 0 for share in args.open):
        parser.error(f"--open: shares must be above 0, got {args.open}")
    if args.open and "none" not in args.policies:
        parser.error("--open: the capacity is that of the policy none, which --policies lacks")
    job = ScriptedRun(args.out, device, args.rehearse, end_s, loads, args.policies, args.open)
    torch.set_num_threads(1)  # as the engine process has with a GPU
    job.result |= {"seed": SEED, "rehearsal": args.rehearse}
    started = time.monotonic()
    compile_all()
    job.result |= {"planner": PLANNER, "compiling_s": round(time.monotonic() - started, 1)}
    engine, heads = engines_of(job)
    started = time.monotonic()
    engine.prepare(heads, job.places)
    job.result |= {"capturing_s": round(time.monotonic() - started, 1), "graphs": engine.graphs}
    spare_the_collector()
    policies(job, engine, heads, tables(job, engine, heads))
    job.keep()


if __name__ == "__main__":
    main()
