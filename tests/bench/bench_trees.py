"""Trees against chains on a real model: what their passes cost, how often second choices hold, and what is served. Prints JSON.

    python -m tests.bench.bench_trees time  --config model_repository/spindle/1/serving.json
    python -m tests.bench.bench_trees ranks --config model_repository/spindle/1/serving.json
    python -m tests.bench.bench_trees serve --config model_repository/spindle/1/serving.json

``time`` takes the target's verification of chains and trees (interleaved, forwards and backwards), the draft's run with and without second
choices, and the move of an accepted leaf's KV beside what one more row costs in the next pass. ``ranks`` counts, on the texts of
``tests.bench.workloads``, how often the candidate of each rank is accepted where those before it were not. ``serve`` compares tokens per
second of fixed chains and trees (and of two drafts' merged chains), one request at a time, block by block. Times are CPU times of the one
thread that does everything, so that other jobs on the machine matter less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend import machine
from backend.app import App, build, model_path
from backend.config import load_config
from backend.engines.torch_engine import TorchEngine
from backend.ports import BLOCK_TOKENS, Proposal, Sequence, Turn
from backend.request import GenerationRequest, SamplingParams
from policy import NO_DRAFT, FixedLength, NoSpeculation, Outcome, Plan, TurnShape, View
from tests.bench import workloads
from tests.bench.in_process import Sink, serve
from tests.bench.paired import abba, median_interval

CHAINS = tuple((1,) * k for k in range(9))
TREES = ((2,), (2, 1), (2, 1, 1), (2, 2, 1), (2, 1, 1, 1), (3, 2, 1, 1), (2, 2, 2, 2), (4, 2, 1, 1), (3, 2, 2, 2))
RULES = {"greedy": {}, "sampled": {"temperature": 0.8}, "plan-invariant": {"temperature": 0.8}}


class FixedTree(FixedLength):
    """The same widths for everyone, cut to each request's ceiling; ``second`` (draft, length) is proposed where the first draft can."""

    def __init__(self, draft: str, widths: tuple[int, ...], second: tuple[str, int] | None = None) -> None:
        super().__init__(draft, len(widths))
        self._widths, self._second = np.array(widths, np.int64), second
        self.outcomes: list[Outcome] = []

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> tuple[Plan, None]:
        """Plan the chains of ``FixedLength`` with siblings."""
        plan, _ = super().plan(view, state, now, rng)
        width = np.where(np.arange(len(self._widths)) < plan.length[:, None], self._widths, 0)
        if self._second is None:
            return replace(plan, shape=TurnShape(width)), None
        column = view.drafts.index(self._second[0])
        length = np.minimum(self._second[1], view.ceiling[:, column])
        lone = plan.length == 0
        drafts = np.where(lone & (length > 0), column, plan.draft), np.where(lone, NO_DRAFT, column)
        lengths = np.where(lone, length, plan.length), np.where(lone, 0, length)
        shape = TurnShape(None, np.where(lengths[1] > 0, drafts[1], NO_DRAFT), lengths[1])
        return replace(plan, draft=drafts[0], length=lengths[0], shape=shape), None

    def observe(self, outcome: Outcome, state: None, now: float) -> None:
        """Keep the outcome."""
        del state, now
        self.outcomes.append(outcome)


# -- time


def time_passes(app: App, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians in ms of the target's and the draft's parts of a step of one request, nothing of which is accepted."""
    target, draft = app.target, app.drafts[0]
    rng = np.random.default_rng(arguments.seed)
    text = rng.integers(0, target.limits.vocab_size, arguments.context + 1).tolist()
    passes = {str(list(w)): verification(target, text, w, rng) for w in (*CHAINS, *TREES)}
    runs = {f"{rule}, widths {w}": free_run(draft, text, w, rule) for rule in RULES for w in ((1,) * 4, (2, 1, 1, 1), (3, 2, 1, 1))}
    found = {"verify_ms": medians(passes, arguments.rounds), "draft_run_of_4_ms": medians(runs, arguments.rounds)}
    model, slots = target._model, torch.arange(4)
    with torch.inference_mode():
        moves = {f"{n} tokens": lambda n=n: model.move(slots[:n], slots[:n] + 8) for n in (1, 3)}
        found["move_ms"] = medians(moves, 5 * arguments.rounds)
    return {**found, "context_tokens": arguments.context}


def verification(engine: TorchEngine, text: list[int], widths: tuple[int, ...], rng: np.random.Generator) -> Callable[[], None]:
    """Return a step that verifies a tree of random tokens."""
    tokens = iter(rng.choice(engine.limits.vocab_size, sum(widths), replace=False).tolist())
    spine = [next(tokens) for _ in widths]
    proposal = Proposal("bench", spine, siblings=[[next(tokens) for _ in range(w - 1)] for w in widths]) if widths else None
    return turn(engine, Turn(sequence(engine, text, "greedy"), len(text), proposal=proposal))


def free_run(engine: TorchEngine, text: list[int], widths: tuple[int, ...], rule: str) -> Callable[[], None]:
    """Return a draft's run."""
    return turn(engine, Turn(sequence(engine, text, rule), len(text), run=len(widths), keep_probs=True, widths=widths))


def sequence(engine: TorchEngine, text: list[int], rule: str) -> Sequence:
    """Return a sequence whose KV blocks every other one overwrites too."""
    sampling = SamplingParams(**RULES[rule], coupled=rule == "plan-invariant")
    return Sequence(id(object()), text, len(text), sampling, {engine.name: list(range(len(text) // BLOCK_TOKENS + 2))})


def turn(engine: TorchEngine, asked: Turn) -> Callable[[], None]:
    """Return a call that runs a turn behind a text that is taken as seen but for its last token."""

    def run() -> None:
        engine.assume(asked.sequence, len(asked.sequence.tokens) - 1)
        engine.submit([asked])
        if error := engine.poll(0.0)[0].error:
            raise RuntimeError(error)

    return run


def medians(arms: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return each arm's median in ms of CPU time (of this one thread: others run on the machine), the arms taken there and back."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(rounds + 1):
        for name in abba(list(arms), block):
            started = time.thread_time()
            arms[name]()
            if block:
                times[name].append(1e3 * (time.thread_time() - started))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


# -- ranks


def count_ranks(app: App, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return, by rule and workload, the hazard of each rank at each depth with the times that it was tested."""
    rows = []
    for rule in RULES:
        for workload in workloads.NAMES:
            policy = FixedTree(app.config.drafts[0].name, tuple(arguments.widths))
            serve(app, sessions(app, workload, rule, arguments), 4, policy)
            rows.append({"rule": rule, "workload": workload, **hazards(policy.outcomes, arguments.widths)})
    return {"widths": arguments.widths, "rows": rows}


def hazards(outcomes: list[Outcome], widths: list[int]) -> dict[str, Any]:
    """Return tested and accepted candidates by depth and rank, and the tokens emitted a step."""
    tested, accepted = np.zeros((2, len(widths), max(widths)), np.int64)
    steps = tokens = 0
    for outcome in (o for o in outcomes if o.shape is not None and o.rank is not None):
        for row in np.flatnonzero(outcome.length > 0).tolist():
            along, scored, rank = int(outcome.accepted[row]), int(outcome.scored[row]), int(outcome.rank[row])
            tested[: min(along + 1, scored), 0] += 1
            accepted[:along, 0] += 1
            if along < scored:
                last = rank or int(outcome.shape.width[row, along])
                tested[along, 1:last] += 1
                if rank:
                    accepted[along, rank - 1] += 1
            steps, tokens = steps + 1, tokens + int(outcome.emitted[row])
    share = np.round(accepted / np.maximum(tested, 1), 3)
    return {"hazard": share.tolist(), "tested": tested.tolist(), "tokens_per_step": round(tokens / max(steps, 1), 3), "steps": steps}


def sessions(app: App, workload: str, rule: str, arguments: argparse.Namespace) -> list[Any]:
    """Return new sessions of a workload's prompts under a rule."""
    folder = model_path(app.config.target)
    messages = workloads.load(workload, arguments.requests, arguments.seed).messages
    options = {**RULES[rule], "max_tokens": arguments.max_tokens}
    made = [app.session(GenerationRequest(workloads.render(message, folder), **options), Sink()) for message in messages]
    for number, session in enumerate(made):
        session.sequence.sampling = replace(session.sequence.sampling, seed=arguments.seed + number, coupled=rule == "plan-invariant")
    return made


# -- serve


def serve_arms(app: App, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of decoding by arm and workload, and their ratios to the best chain of the same block of requests."""
    name, lookup = app.config.drafts[0].name, app.config.drafts[-1].name
    arms: dict[str, Callable[[], Any]] = {"none": NoSpeculation}
    arms |= {f"chain {k}": lambda k=k: FixedLength(name, k) for k in (2, 3, 4)}
    arms |= {f"tree {list(w)}": lambda w=w: FixedTree(name, w) for w in ((2, 1), (2, 2, 1), (3, 2, 1, 1))}
    arms |= {"lookup 3": lambda: FixedLength(lookup, 3), "merged, lookup 3 and draft 2": lambda: FixedTree(lookup, (1,) * 3, (name, 2))}
    rows = []
    for rule in arguments.rules:
        for workload in workloads.NAMES:
            speeds: dict[str, list[float]] = {arm: [] for arm in arms}
            for block in range(arguments.requests):
                for arm in abba(list(arms), block):
                    speeds[arm].append(speed(app, workload, rule, block, arms[arm](), arguments))
            rows.append({"rule": rule, "workload": workload, **compared(speeds, arguments.seed)})
    return {"rows": rows}


def speed(app: App, workload: str, rule: str, block: int, policy: Any, arguments: argparse.Namespace) -> float:
    """Return a request's tokens per second of CPU time (all is done by one thread) from its first token on."""
    session = sessions(app, workload, rule, arguments)[block]
    ticks: list[tuple[float, int]] = []
    emit = app.orchestrator._emit

    def noted(served: Any) -> None:
        ticks.append((time.thread_time(), served.output_tokens))
        emit(served)

    app.orchestrator._emit = noted  # type: ignore[method-assign]
    try:
        serve(app, [session], 1, policy)
    finally:
        app.orchestrator._emit = emit  # type: ignore[method-assign]
    (first_s, first), (last_s, last) = ticks[0], ticks[-1]
    return (last - first) / max(last_s - first_s, 1e-9)


def compared(speeds: dict[str, list[float]], seed: int) -> dict[str, Any]:
    """Return median speeds, and the ratio of every arm but the chains to the chain that is best by its median."""
    middle = {arm: round(statistics.median(values), 2) for arm, values in speeds.items()}
    best = max((arm for arm in speeds if arm.startswith("chain")), key=lambda arm: middle[arm])
    ratios = {}
    for arm, values in speeds.items():
        pairs = [one / other for one, other in zip(values, speeds[best], strict=True) if one > 0 and other > 0]
        low, high = median_interval(pairs, seed)
        ratios[arm] = [round(statistics.median(pairs), 3), round(low, 3), round(high, 3)]
    return {"tokens_per_s": middle, "best_chain": best, "ratio_to_best_chain": ratios}


def main() -> None:
    """Run one of the measurements and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measurement", choices=["time", "ranks", "serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=10, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 2, 2, 1], help="of every tree, in ranks; at most k_max in all")
    parser.add_argument("--rules", choices=list(RULES), nargs="+", default=["greedy"], help="in serve")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    app = build(replace(config, policy=replace(config.policy, kind="none")), {})
    run = {"time": time_passes, "ranks": count_ranks, "serve": serve_arms}[arguments.measurement]
    command = ["python", "-m", "tests.bench.bench_trees", *sys.argv[1:]]
    record = {"command": command, "machine": machine.describe(), "seed": arguments.seed, "dtype": config.target.dtype, "threads": 1}
    print(json.dumps({**record, **run(app, arguments)}, indent=1))


if __name__ == "__main__":
    main()
