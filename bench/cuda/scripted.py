"""Policies on real passes of random weights whose acceptance is scripted, the same for all:
``python -m bench.cuda.scripted --out FILE``.

The target is an 8B on the CUDA engine with a turn of lookahead, the drafts are two heads that it
runs; ``bench.cuda.script`` says which of their nodes are right. Latency tables are measured first,
by the device's clock; the record is written after every cell. ``--rehearse`` runs small shapes on a
CPU in half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from backend.config import parse_config
from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engine_process import spare_the_collector
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.head.folder import HeadConfig
from backend.engines.head.in_target import HeadInTarget
from backend.engines.head.network import HeadNetwork
from backend.engines.latency_cases import Case
from backend.engines.port import Engine
from backend.machine import machine
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS
from backend.sequence import Sequence as Text
from backend.speculation.drafting import Drafting
from backend.speculation.policy_factory import make_policy
from bench.cuda import PLANNER
from bench.cuda.exactness_parts import random_llama
from bench.cuda.script import Rates, ScriptedProposal, ScriptedSteps
from bench.cuda.step import SHAPES, Shape
from engines_build.measure import lower_quartile, tabulate
from engines_build.timing import Rig, interleave
from policy import AnyPolicy
from policy.latency import LatencyTable, Provenance
from policy.loops.compiling import compile_all

SEED = 0
TARGET, DRAFTS = "target", ("large", "small")
ACCEPTANCE = {"large": Rates(0.9, 0.65), "small": Rates(0.85, 0.4)}
"""How often a head's first node is right, at places that are not hard."""

HEADS = {"large": (14336, 32000), "small": (4096, 8192)}
"""Inner size and static rows of each head."""

K_MAX, PROMPT_TOKENS, NEW_TOKENS, ACTIVE = 8, 1000, 200, 128
LOADS = (1, 8, 32, 64, 128)
LENGTHS = {"large": (1, 2, 4, 8), "small": (2, 4)}
"""Lengths of the fixed policies."""


@dataclass
class Job:
    """One run: where, for how long, and what it has found so far."""

    out: Path
    device: str
    rehearse: bool
    end_s: float  # on ``time.monotonic``
    loads: Sequence[int]  # requests in flight
    arms: Sequence[str]  # of ``arms``
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    @property
    def shape(self) -> Shape:
        """The target's."""
        return SHAPES["tiny" if self.rehearse else "8b"]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, whose KV is taken as there."""
        return 40 if self.rehearse else PROMPT_TOKENS

    def keep(self) -> None:
        """Write what there is."""
        self.out.write_text(json.dumps(self.result, indent=1) + "\n", "utf-8")


class ScriptedEngine(LookaheadEngine):
    """An engine whose acceptance is scripted, and that takes prompts as read but for a token."""

    steps_type = ScriptedSteps

    @property
    def graphs(self) -> int:
        """How many CUDA graphs of steps it has captured."""
        return self._steps.graphs

    def unseen(self, sequence: Text) -> int:
        """Return how many committed tokens have no KV; of a new prompt one."""
        if sequence.blocks and not self._caches.matching(sequence):
            self.assume(sequence, sequence.prompt_tokens - 1)
        return super().unseen(sequence)


def engines_of(job: Job) -> tuple[ScriptedEngine, list[HeadInTarget]]:
    """Make the target and its heads, of random weights."""
    shape, dtype = job.shape, torch.float32 if job.rehearse else torch.bfloat16
    taps = (1, shape.layers // 2, shape.layers)
    lm = random_llama(shape, job.device, dtype)
    active = 4 if job.rehearse else ACTIVE
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


def cases_of(job: Job) -> dict[str, list[Case]]:
    """Return the cases that are measured of every engine."""
    context = job.prompt_tokens
    rows = (1, 4) if job.rehearse else (1, 2, 4, 8, 16, 32, 64, 128)
    lengths = (0, 4) if job.rehearse else (0, 1, 2, 4, 8)
    target = [
        Case(n, context, length=length) for n in rows for length in lengths if n * length <= 512
    ]
    target += [Case(n, context // 2) for n in rows[-2:]]
    return {TARGET: target} | {name: [Case(n, context, run=4) for n in rows] for name in DRAFTS}


def tables(job: Job, engine: ScriptedEngine, heads: list[HeadInTarget]) -> dict[str, LatencyTable]:
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
    found = dict(zip(work, samples, strict=True))
    made = {
        name: tabulate(
            name,
            own,
            [lower_quartile(found[name, case]) for case in own],
            provenance(job),
            engine.limits.widths if name == TARGET else (),
        )
        for name, own in cases.items()
    }
    job.result["tables"] = {name: table.to_dict() for name, table in made.items()}
    job.result["tables_s"] = round(time.monotonic() - started, 1)
    job.keep()
    return made


def provenance(job: Job) -> Provenance:
    """Return where a table comes from."""
    device = torch.cuda.get_device_name() if job.device == "cuda" else job.device
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(
        machine.processor(), device, "random weights", "", "bf16", 1, date, torch.__version__
    )


class Silent:
    """A client that reads nothing, and a decoder of tokens without text."""

    def __init__(self) -> None:
        self.cancelled = self.ended = False

    def chunk(self, delta: Any) -> None:
        """Ignore."""

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        """Note the end."""
        self.ended = True

    def error(self, code: Any, message: str) -> None:
        """Note the end; an error of a request that was not cancelled is raised."""
        self.ended = True
        if not self.cancelled:
            raise RuntimeError(f"{code}: {message}")

    def push(self, token_id: int) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


_ids = itertools.count(1_000_000)


class ClosedLoop:
    """A fixed number of requests in flight, each followed by the next; the n-th has the same prompt
    for every policy.
    """

    def __init__(
        self,
        target: ScriptedEngine,
        drafts: list[Engine],
        policy: AnyPolicy,
        in_flight: int,
        prompt_tokens: int,
    ) -> None:
        self.tokens = self.steps = 0
        self.device_s = 0.0
        """Part of ``run``'s time in which the device was at work, by its own clock."""
        self._target = target
        self._in_flight, self._prompt_tokens = in_flight, prompt_tokens
        self._live = list[tuple[Session, Silent]]()
        self._numbers = itertools.count(1)
        step_stats = StepStats(Stats())
        ledger = KVLedger(
            {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)},
            2 * (K_MAX + 1),
            guaranteed=True,
        )
        self._loop = Orchestrator(
            target,
            Drafting(drafts, step_stats, time.monotonic),
            policy,
            ledger,
            Admission(ledger, ACTIVE, ACTIVE),
            step_stats,
            time.monotonic,
            k_max=K_MAX,
            prefill_chunk_tokens=prompt_tokens,
            seed=SEED,
        )

    def run(self, seconds: float) -> float:
        """Serve for some seconds and return how many it took; ``tokens``, ``steps`` and
        ``device_s`` are its.
        """
        self.device_s = 0.0
        self.steps, before, ended = 0, sum(session.output_tokens for session, _ in self._live), 0
        start = time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            while len(self._live) < self._in_flight:
                self._submit()
            self._loop.step()
            self.device_s += sum(self._target.parts_s().values())
            self.steps += 1
            ended += sum(session.output_tokens for session, sink in self._live if sink.ended)
            self._live = [pair for pair in self._live if not pair[1].ended]
        self.tokens = ended + sum(session.output_tokens for session, _ in self._live) - before
        return now - start

    def _submit(self) -> None:
        number = next(self._numbers)
        prompt = [number % 500] * self._prompt_tokens
        sampling = SamplingParams(seed=number)
        sequence = Text(next(_ids), prompt, len(prompt), sampling)
        sink = Silent()
        request = GenerationRequest("", NEW_TOKENS)
        self._live.append((Session(sequence, request, frozenset(), sink, sink), sink))
        self._loop.submit(self._live[-1][0])

    def end(self) -> None:
        """Let go of every request."""
        for _, sink in self._live:
            sink.cancelled = True
        while self._loop.step():
            pass


def arms() -> dict[str, dict[str, Any]]:
    """Return the policies by name, as ``serving.json`` has them."""
    fixed = {
        f"{draft} {k}": {"kind": "fixed", "draft": draft, "length": k}
        for draft, lengths in LENGTHS.items()
        for k in lengths
    }
    return {"none": {"kind": "none"}, **fixed, "adaptive": {"kind": "adaptive"}}


def policies(
    job: Job,
    engine: ScriptedEngine,
    heads: list[HeadInTarget],
    latency: dict[str, LatencyTable],
) -> None:
    """Serve none, each fixed choice and the adaptive policy, in a new order in each of two
    rounds.
    """
    cells = [(arm, load) for load in job.loads for arm in job.arms]
    rng, rounds = random.Random(SEED), 1 if job.rehearse else 2
    shares = {arm: 2.0 if arm == "adaptive" else 0.1 for arm in job.arms}
    spans = rounds * (len(cells) + 0.5 * len(job.loads)) + len(job.loads) * sum(shares.values())
    each_s = 0.9 * job.left_s / spans
    for arm, load in cells:  # graphs are captured now; adapting has the most
        span_s = 0.02 if job.rehearse else shares[arm] * each_s
        serve(job, engine, heads, arm, load, latency, (0.0, span_s))
    warm_s, measured_s = (0.05, 0.2) if job.rehearse else (0.25 * each_s, 0.75 * each_s)
    learning_s = 2.0 * warm_s
    job.result |= {
        "acceptance": {name: asdict(rates) for name, rates in ACCEPTANCE.items()},
        "tokens": [job.prompt_tokens, NEW_TOKENS],
        "warm_s": round(warm_s, 3),
        "learning_s": round(learning_s, 3),
        "measured_s": round(measured_s, 3),
        "cells": [],
    }
    for round_ in range(rounds):
        for arm, load in rng.sample(cells, len(cells)):
            row = {"round": round_, "policy": arm, "in_flight": load}
            spans_s = warm_s + learning_s * (arm == "adaptive"), measured_s
            cell = row | serve(job, engine, heads, arm, load, latency, spans_s)
            job.result["cells"].append(cell)
            print(cell, flush=True)
            job.keep()
    job.result["summary"] = summary(job.result["cells"])


def serve(
    job: Job,
    engine: ScriptedEngine,
    heads: list[HeadInTarget],
    arm: str,
    load: int,
    latency: dict[str, LatencyTable],
    spans_s: tuple[float, float],
) -> dict[str, float]:
    """Return what a policy serves of a load in the second span; in the first it learns."""
    config = parse_config(
        {
            "target": {"engine": "cuda", "name": TARGET, "model": "none", "lookahead": 1},
            "drafts": [{"engine": "head", "name": name, "model": "none"} for name in DRAFTS],
            "policy": arms()[arm] | {"k_max": K_MAX},
        }
    )
    drafts: list[Engine] = [*heads]
    policy = make_policy(config, drafts, latency, StepStats(Stats()))
    loop = ClosedLoop(engine, drafts, policy, load, job.prompt_tokens)
    loop.run(spans_s[0])
    waited_s, graphs = ScriptedSteps.waited_s, engine.graphs
    seconds = loop.run(spans_s[1])
    waited_s = ScriptedSteps.waited_s - waited_s
    loop.end()
    return {
        "tokens_per_s": round(loop.tokens / seconds, 2),
        "step_ms": round(1e3 * seconds / max(1, loop.steps), 4),
        "device_ms": round(1e3 * loop.device_s / max(1, loop.steps), 4),
        "graphs": engine.graphs - graphs,
        "host_ms": round(1e3 * (seconds - waited_s) / max(1, loop.steps), 4),
        "tokens_per_step_and_row": round(loop.tokens / max(1, loop.steps) / load, 3),
    }


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by load what adapting serves over none and over the best fixed choice, by means over
    the rounds.
    """
    found = {}
    for load in sorted({cell["in_flight"] for cell in cells}):
        rates: dict[str, list[float]] = {}
        for cell in cells:
            if cell["in_flight"] == load:
                rates.setdefault(cell["policy"], []).append(cell["tokens_per_s"])
        means = {arm: sum(values) / len(values) for arm, values in rates.items()}
        row: dict[str, Any] = {"tokens_per_s": {arm: round(mean, 2) for arm, mean in means.items()}}
        found[str(load)] = row
        fixed = [arm for arm in means if arm not in ("none", "adaptive")]
        best = max(fixed, key=means.__getitem__, default="")
        row["best_fixed"] = best
        for name, other in (("best_fixed", best), ("none", "none")):
            if "adaptive" in means and other in means:
                row[f"adaptive_over_{name}"] = round(means["adaptive"] / means[other], 3)
    return found


def main() -> None:
    """Measure tables, then policies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--loads", type=int, nargs="+", help=f"in flight, of {LOADS}")
    parser.add_argument("--policies", nargs="+", choices=[*arms()], default=[*arms()])
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args()
    loads = args.loads or ((1, 4) if args.rehearse else LOADS)
    end_s = time.monotonic() + (30.0 if args.rehearse else args.seconds)
    device = "cpu" if args.rehearse else "cuda"
    job = Job(args.out, device, args.rehearse, end_s, loads, args.policies)
    torch.set_num_threads(1)  # as the engine process has with a GPU
    command = ["python", "-m", "bench.cuda.scripted", *sys.argv[1:]]
    job.result |= {"command": command, "seed": SEED}
    job.result |= {"machine": machine.describe(), "rehearsal": args.rehearse}
    started = time.monotonic()
    compile_all()
    job.result |= {"planner": PLANNER, "compiling_s": round(time.monotonic() - started, 1)}
    engine, heads = engines_of(job)
    spare_the_collector()
    policies(job, engine, heads, tables(job, engine, heads))
    job.keep()


if __name__ == "__main__":
    main()
