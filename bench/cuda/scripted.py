"""Policies on real passes of random weights whose acceptance is scripted, the same for all:
``python -m bench.cuda.scripted --out FILE``.

A random-weight draft is never right. So every engine runs its passes for their time, and a script
says what came of them: the text of the n-th request, and the places where each draft knows it.
Every policy meets the same accepted and rejected tokens. Latency tables are measured first; the
record is written after every cell. ``--rehearse`` runs small shapes on a CPU in half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from backend.config import parse_config
from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.checkpoint import LlamaConfig
from backend.engines.latency_cases import blocks_for, draft_cases, target_cases
from backend.engines.port import Completion, Engine, Turn
from backend.engines.torch.engine import TorchEngine
from backend.machine import machine
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Proposal, Sequence
from backend.speculation.drafting import Drafting
from backend.speculation.policy_factory import make_policy
from engines_build.measure import lower_quartile, tabulate
from engines_build.timing import Rig, interleave
from policy import AnyPolicy
from policy.latency import LatencyTable, Provenance

SEED = 0
SHAPES = {
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128),
    "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "tiny": LlamaConfig(512, 64, 128, 2, 4, 2, 16, tied=True),
    "tinier": LlamaConfig(512, 32, 64, 1, 2, 2, 16, tied=True),
}
"""Llama 3.1 8B, Llama 3.2 1B, SmolLM2 135M; the last two are for rehearsals."""
TARGET, DRAFTS = "target", ("large", "small")
ACCEPTANCE = {"large": (0.9, 0.6), "small": (0.85, 0.3)}
"""Share of the places where a draft knows the text: of requests with an even number, and of the
others.
"""

VOCABULARY = 256
K_MAX, PROMPT_TOKENS, NEW_TOKENS, ACTIVE = 8, 16, 100, 64
LENGTHS = (1, 2, 4, 8)
"""Of the fixed policies."""


@dataclass
class Job:
    """One run: where, for how long, and what it has found so far."""

    out: Path
    device: str
    rehearse: bool
    end_s: float  # on ``time.monotonic``
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of every engine by name."""
        found = ("tiny", "tinier", "tinier") if self.rehearse else ("8b", "1b", "135m")
        return dict(zip((TARGET, *DRAFTS), found, strict=True))

    def keep(self) -> None:
        """Write what there is."""
        self.out.write_text(json.dumps(self.result, indent=1) + "\n", "utf-8")


def engine_of(shape: str, device: str, kv_blocks: int, context: int, name: str) -> TorchEngine:
    """Make an engine of random bf16 weights whose sequences have up to ``context`` tokens."""
    config, generator = SHAPES[shape], torch.Generator(device).manual_seed(SEED)
    weights = {}
    for key, size in config.shapes().items():
        weights[key] = torch.ones(size, dtype=torch.bfloat16, device=device)
        if len(size) > 1:
            weights[key].normal_(generator=generator).mul_(config.hidden_size**-0.5)
    sizes = {"kv_blocks": kv_blocks, "max_context_tokens": context, "max_draft_tokens": 16}
    return TorchEngine.from_weights(name, config, weights, **sizes)


def tables(job: Job) -> None:
    """Measure the table of every engine as ``engines_build.measure`` does, one after the other."""
    job.result["tables"] = {}
    rng = random.Random(SEED)
    for number, (name, shape) in enumerate(job.shapes.items()):
        share_s = 0.5 * job.left_s / (len(DRAFTS) + 1 - number)
        budget_s = max(share_s - 20, share_s / 2)  # the rest makes the engine
        cases = target_cases() if name == TARGET else draft_cases()
        if job.rehearse:
            cases = [case for case in cases if case.rows <= 4 and case.context <= 64]
            budget_s = 1.5
        context = max(case.context + case.new for case in cases)
        engine = engine_of(shape, job.device, blocks_for(cases), context, name)
        rig = Rig(engine, rng)
        work = [lambda rig=rig, case=case: rig.time(case) for case in cases]
        samples = interleave(
            work, budget_s=budget_s, rng=rng, report=lambda _elapsed_s, _expected_s: None
        )
        table = tabulate(
            name, cases, [lower_quartile(times) for times in samples], provenance(job, shape)
        )
        job.result["tables"][name] = table.to_dict() | {"rounds": len(samples[0])}
        job.keep()
        engine.close()


def provenance(job: Job, shape: str) -> Provenance:
    """Return where a table comes from."""
    device = torch.cuda.get_device_name() if job.device == "cuda" else job.device
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(
        machine.processor(), device, f"random {shape}", "", "bf16", 1, date, torch.__version__
    )


class Script:
    """The text of the n-th request, prompt and answer, and what each draft proposes of it."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._known: dict[tuple[int, str], list[bool]] = {}

    def text(self, number: int) -> list[int]:
        """Return the tokens of a request, and what could be proposed after its end."""
        if number not in self._texts:
            rng, length = random.Random(number), PROMPT_TOKENS + NEW_TOKENS + 2 * K_MAX
            self._texts[number] = rng.choices(range(VOCABULARY), k=length)
            for draft, rates in ACCEPTANCE.items():
                coins = random.Random(f"{number} {draft}")
                self._known[number, draft] = [
                    coins.random() < rates[number % 2] for _ in range(length)
                ]
        return self._texts[number]

    def proposal(self, number: int, draft: str, start: int, count: int) -> list[int]:
        """Return what a draft proposes from a place on: the text where it knows it, another token
        where not.
        """
        known = self._known[number, draft]
        return [
            (token + (not known[at])) % VOCABULARY
            for at, token in enumerate(self.text(number)[start : start + count], start)
        ]


class Paced:
    """An engine that takes its time on the device and finds what the script says."""

    def __init__(self, engine: TorchEngine, script: Script) -> None:
        self.name, self._engine, self._script = engine.name, engine, script
        limits = replace(engine.limits, vocab_size=VOCABULARY, tree=False)
        self.limits = replace(limits, scores=False)
        self._turns: list[Turn] = []

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns."""
        self._turns += turns
        self._engine.submit(turns)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run what is queued, and complete it as the script says. Raises RuntimeError where a turn
        could not be run.
        """
        turns, self._turns = self._turns, []
        for done in self._engine.poll(timeout_s):
            if done.error:
                raise RuntimeError(done.error)
        return [self._told(turn) for turn in turns]

    def _told(self, turn: Turn) -> Completion:
        number, text = turn.sequence.id, self._script.text(turn.sequence.id)
        if turn.nodes:  # a draft's: the KV of what it ran counts as that of the script's tokens
            tokens = self._script.proposal(number, self.name, turn.end, turn.run)
            cache = self._engine._caches.of(turn.sequence)
            cache.ran[turn.end :] = tokens[: len(cache.ran) - turn.end]
            cache.proposed = Proposal.chain(self.name, tokens)
            return Completion(number, [], proposal=cache.proposed)
        proposed = turn.proposal.tokens if turn.proposal else []
        pairs = zip(proposed, text[turn.end :], strict=False)
        accepted = next(
            (at for at, (one, other) in enumerate(pairs) if one != other), len(proposed)
        )
        return Completion(number, text[turn.end : turn.end + accepted + turn.run], accepted)

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences."""
        gone = set(sequence_ids)
        self._turns = [turn for turn in self._turns if turn.sequence.id not in gone]
        self._engine.cancel(gone)

    def unseen(self, sequence: Sequence) -> int:
        """Return the tokens to catch up on."""
        return self._engine.unseen(sequence)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed."""
        return self._engine.available(sequence, length)

    def close(self) -> None:
        """Release the model."""
        self._engine.close()


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


class ClosedLoop:
    """A fixed number of requests in flight, each followed by the next; the n-th has the same prompt
    for every policy.
    """

    def __init__(
        self, engines: list[Engine], script: Script, policy: AnyPolicy, in_flight: int
    ) -> None:
        self.tokens = self.steps = 0
        self._script, self._in_flight, self._live = (
            script,
            in_flight,
            list[tuple[Session, Silent]](),
        )
        self._numbers = itertools.count(1)
        step_stats = StepStats(Stats())
        ledger = KVLedger(
            {engine.name: engine.limits.kv_blocks for engine in engines}, K_MAX + 1, guaranteed=True
        )
        self._loop = Orchestrator(
            engines[0],
            Drafting(engines[1:], step_stats, time.monotonic),
            policy,
            ledger,
            Admission(ledger, ACTIVE, ACTIVE),
            step_stats,
            time.monotonic,
            k_max=K_MAX,
            prefill_chunk_tokens=PROMPT_TOKENS,
            seed=SEED,
        )

    def run(self, seconds: float) -> float:
        """Serve for some seconds and return how many it took; ``tokens`` and ``steps`` are its."""
        self.steps, before, ended = 0, sum(session.output_tokens for session, _ in self._live), 0
        start = time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            while len(self._live) < self._in_flight:
                self._submit()
            self._loop.step()
            self.steps += 1
            ended += sum(session.output_tokens for session, sink in self._live if sink.ended)
            self._live = [pair for pair in self._live if not pair[1].ended]
        self.tokens = ended + sum(session.output_tokens for session, _ in self._live) - before
        return now - start

    def _submit(self) -> None:
        number = next(self._numbers)
        sequence = Sequence(
            number, self._script.text(number)[:PROMPT_TOKENS], PROMPT_TOKENS, SamplingParams()
        )
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
        for draft in DRAFTS
        for k in LENGTHS
    }
    return {"none": {"kind": "none"}, **fixed, "adaptive": {"kind": "adaptive"}}


def policies(job: Job) -> None:
    """Serve none, each fixed choice and the adaptive policy, in a new order in each of two
    rounds.
    """
    latency = {
        name: LatencyTable.from_dict({k: v for k, v in table.items() if k != "rounds"})
        for name, table in job.result["tables"].items()
    }
    blocks, context = ACTIVE * 8, PROMPT_TOKENS + NEW_TOKENS + K_MAX
    script = Script()
    engines: list[Engine] = [
        Paced(engine_of(shape, job.device, blocks, context, name), script)
        for name, shape in job.shapes.items()
    ]
    loads = (1, 4) if job.rehearse else (1, 8, 32, 64)
    cells = [(arm, load) for load in loads for arm in arms()]
    rng, rounds = random.Random(SEED), 1 if job.rehearse else 2
    each_s = 0.9 * job.left_s / ((rounds + 0.2) * len(cells))
    for arm, load in cells:
        served(engines, script, arm, load, latency, (0.0, 0.02 if job.rehearse else 0.2 * each_s))
    warm_s, measured_s = (0.05, 0.2) if job.rehearse else (0.25 * each_s, 0.75 * each_s)
    job.result |= {
        "acceptance": ACCEPTANCE,
        "tokens": [PROMPT_TOKENS, NEW_TOKENS],
        "measured_s": round(measured_s, 3),
        "cells": [],
    }
    for round_ in range(rounds):
        for arm, load in rng.sample(cells, len(cells)):
            row = {"round": round_, "policy": arm, "in_flight": load}
            job.result["cells"].append(
                row | served(engines, script, arm, load, latency, (warm_s, measured_s))
            )
            job.keep()
    job.result["summary"] = summary(job.result["cells"])


def served(
    engines: list[Engine],
    script: Script,
    arm: str,
    load: int,
    latency: dict[str, LatencyTable],
    spans_s: tuple[float, float],
) -> dict[str, float]:
    """Return what a policy serves of a load in the second span; in the first it learns."""
    named = [{"engine": "torch", "name": engine.name, "model": "none"} for engine in engines]
    config = parse_config(
        {"target": named[0], "drafts": named[1:], "policy": arms()[arm] | {"k_max": K_MAX}}
    )
    loop = ClosedLoop(
        engines, script, make_policy(config, engines[1:], latency, StepStats(Stats())), load
    )
    loop.run(spans_s[0])
    seconds = loop.run(spans_s[1])
    loop.end()
    return {
        "tokens_per_s": round(loop.tokens / seconds, 2),
        "step_ms": round(1e3 * seconds / max(1, loop.steps), 4),
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
        best = max((arm for arm in means if arm not in ("none", "adaptive")), key=means.__getitem__)
        adaptive = means["adaptive"]
        found[str(load)] = {
            "tokens_per_s": {arm: round(mean, 2) for arm, mean in means.items()},
            "best_fixed": best,
            "adaptive_over_best_fixed": round(adaptive / means[best], 3),
            "adaptive_over_none": round(adaptive / means["none"], 3),
        }
    return found


def main() -> None:
    """Measure tables, then policies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args()
    end_s = time.monotonic() + (30.0 if args.rehearse else args.seconds)
    job = Job(args.out, "cpu" if args.rehearse else "cuda", args.rehearse, end_s)
    torch.set_num_threads(1)  # as the engine process has with a GPU
    job.result |= {"command": ["python", "-m", "bench.cuda.scripted"], "seed": SEED}
    job.result |= {"machine": machine.describe(), "rehearsal": args.rehearse}
    tables(job)
    policies(job)
    job.keep()


if __name__ == "__main__":
    main()
