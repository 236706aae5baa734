"""Tokens per second of the adaptive policy against every single choice: ``python -m tests.bench.bench_choices --config FILE --out FILE``.

All in this process. Arms: ``spindle``, the adaptive policy over all drafts of the configuration; ``best-DRAFT`` for each of them, the fixed
length that did best on other prompts at the same load; ``none``, no speculation, by an engine of its own with no draft loaded. A block is
at least as many requests as are in flight, of the mix equally many of each workload; every arm runs it, in ABBA order, the first block
warms up. A ratio is that of tokens per second within a block, its interval the bootstrap's over blocks. The clock counts this process's CPU
time, so that other work costs it its caches only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from backend import machine
from backend.app import App, build, make_policy, model_path, timed_engines
from backend.config import ServingConfig, load_config
from backend.request import GenerationRequest
from backend.session import Session
from backend.tables import load_tables
from policy import Policy
from tests.bench import workloads
from tests.bench.in_process import Sink
from tests.bench.paired import abba, median_interval

_RUNS = itertools.count()
SPINDLE, NONE, BEST = "spindle", "none", "best-"
LENGTHS = (1, 2, 3, 4, 6, 8)
TUNING_SEED = 1000
"""Added to the seed of the prompts on which fixed lengths are chosen."""


@dataclass(slots=True)
class Arm:
    """An app with a policy of its own, whose state outlasts a block."""

    app: App
    policy: Policy
    state: Any

    @classmethod
    def of(cls, app: App, policy: Policy) -> Arm:
        """Return an arm that has learnt nothing."""
        return cls(app, policy, policy.start())

    def serve(self, requests: Sequence[GenerationRequest], in_flight: int) -> tuple[float, list[Session]]:
        """Serve requests, so many at a time; return seconds of CPU time and the sessions."""
        loop, waiting, running = self.app.orchestrator, [self.app.session(request, Sink()) for request in requests], list[Session]()
        sessions = list(waiting)
        kept = loop._policy, loop.policy_state
        loop._policy, loop.policy_state = self.policy, self.state
        started = time.process_time()
        while waiting or running:
            while waiting and len(running) < in_flight:
                running.append(waiting.pop(0))
                loop.submit(running[-1])
            loop.step()
            running = [session for session in running if not session.sink.ended]
        seconds = time.process_time() - started
        self.state = loop.policy_state
        loop._policy, loop.policy_state = kept
        return seconds, sessions


@dataclass(frozen=True, slots=True)
class Run:
    """One arm's run over one block."""

    arm: str
    seconds: float
    output_tokens: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, name: str, arm: Arm, requests: Sequence[GenerationRequest], in_flight: int) -> Run:
        """Serve a block; no KV is reused from other runs of it on the same engines."""
        salt = str(next(_RUNS))
        seconds, sessions = arm.serve([replace(request, cache_salt=salt) for request in requests], in_flight)
        output, drafted, accepted = (
            sum(values) for values in zip(*((s.output_tokens, s.drafted, s.accepted) for s in sessions), strict=True)
        )
        return cls(name, seconds, output, drafted, accepted)

    @property
    def rate(self) -> float:
        """Emitted tokens per second."""
        return self.output_tokens / self.seconds


class Arms:
    """Makes the arms of one configuration."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = replace(config, policy=replace(config.policy, keep_learned=False, trace_file=""))
        self._tables, _ = load_tables(self.config, {engine.name: model_path(engine) for engine in timed_engines(self.config)})
        self._speculating = build(self.config, self._tables)
        self._plain = build(replace(self.config, drafts=(), policy=replace(config.policy, kind="none")), self._tables)

    def spindle(self) -> Arm:
        """Return the adaptive policy, which has learnt nothing."""
        app = self._speculating
        return Arm.of(app, make_policy(self.config, app.drafts, self._tables, app.step_stats, app.target.limits.tree))

    def none(self) -> Arm:
        """Return plain decoding."""
        return Arm.of(self._plain, self._plain.orchestrator._policy)

    def fixed(self, draft: str, length: int) -> Arm:
        """Return one choice for all."""
        config = replace(self.config, policy=replace(self.config.policy, kind="fixed", draft=draft, length=length))
        return Arm.of(self._speculating, make_policy(config, self._speculating.drafts, self._tables, self._speculating.step_stats))


def requests(config: ServingConfig, name: str, count: int, seed: int, options: argparse.Namespace) -> list[GenerationRequest]:
    """Return the requests of all blocks; a workload with fewer messages is gone through again."""
    messages, folder = workloads.load(name, count, seed).messages, model_path(config.target)
    sampling = {"temperature": options.temperature} if options.temperature else {}
    return [
        GenerationRequest(
            messages[i % len(messages)] if options.raw else workloads.render(messages[i % len(messages)], folder),
            options.max_tokens,
            seed=seed * 100_000 + i if sampling and options.plan_invariant else None,
            **sampling,
        )
        for i in range(count)
    ]


def best_length(arms: Arms, draft: str, blocks: list[list[GenerationRequest]], in_flight: int) -> tuple[int, dict[int, float]]:
    """Return the fixed length of a draft with the most tokens per second over all blocks, and the rate of each."""
    made = {length: arms.fixed(draft, length) for length in LENGTHS if length <= arms.config.policy.k_max}
    runs = [Run.of(str(length), arm, block, in_flight) for block in blocks for length, arm in made.items()]
    rates = {}
    for length in made:
        own = [run for run in runs if run.arm == str(length)]
        rates[length] = sum(run.output_tokens for run in own) / sum(run.seconds for run in own)
    return max(rates, key=rates.__getitem__), {length: round(rate, 1) for length, rate in rates.items()}


def point(arms: Arms, name: str, in_flight: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all arms on one workload at one load."""

    kinds = len(workloads.NAMES)
    size = -(-in_flight // kinds) * kinds

    def blocks(count: int, seed: int) -> list[list[GenerationRequest]]:
        every = requests(arms.config, name, count * size, seed, options)
        return [every[i * size : (i + 1) * size] for i in range(count)]

    made, tuned = {SPINDLE: arms.spindle(), NONE: arms.none()}, {}
    tuning = blocks(options.tuning_blocks, options.seed + TUNING_SEED)
    for draft in [engine.name for engine in arms.config.drafts]:
        length, rates = best_length(arms, draft, tuning, in_flight)
        tuned[draft] = {"length": length, "tokens_per_s": rates}
        made[f"{BEST}{draft}"] = arms.fixed(draft, length)
    runs: dict[str, list[Run]] = {arm: [] for arm in made}
    for number, block in enumerate(blocks(options.blocks + 1, options.seed)):
        for arm in abba(list(made), number):
            run = Run.of(arm, made[arm], block, in_flight)
            if number:
                runs[arm].append(run)
    return {"workload": name, "in_flight": in_flight, "tuned": tuned, "arms": compared(runs, options.seed)}


def compared(runs: dict[str, list[Run]], seed: int) -> dict[str, dict[str, Any]]:
    """Return each arm's rate, and the ratio of spindle's to it over the blocks with its interval."""
    figures = {}
    for arm, own in runs.items():
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(runs[SPINDLE], own, strict=True)]
        drafted = sum(run.drafted for run in own)
        output, seconds = sum(run.output_tokens for run in own), sum(run.seconds for run in own)
        figures[arm] = {
            "tokens_per_s": round(output / seconds, 2),
            "drafted_per_token": round(drafted / output, 3),
            "acceptance": round(sum(run.accepted for run in own) / drafted, 3) if drafted else None,
        }
        if arm != SPINDLE:
            figures[arm]["spindle_over_it"] = round(median(ratios), 3)
            figures[arm]["interval_95"] = [round(end, 3) for end in median_interval(ratios, seed)]
    return figures


def show(row: dict[str, Any]) -> None:
    """Print a point."""
    print(f"\n{row['workload']}, {row['in_flight']} in flight", flush=True)
    for arm, figures in row["arms"].items():
        length = row["tuned"].get(arm.removeprefix(BEST), {}).get("length", "")
        ratio = "{spindle_over_it:6.3f}  [{interval_95[0]:.3f}, {interval_95[1]:.3f}]".format(**figures) if arm != SPINDLE else ""
        print(f"  {arm:<20} {length:>2} {figures['tokens_per_s']:>8.1f} tokens/s  {ratio}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every point; the record is written after each, and a point that it has is not measured again."""
    command = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(command)
    record: dict[str, Any] = {
        "benchmark": "tokens per second in process: the adaptive policy against every single choice",
        "command": ["python", "-m", "tests.bench.bench_choices", *command],
        "machine": machine.describe(),
        "config": json.loads(options.config.read_text("utf-8")),
        "points": [],
    }
    if options.out.exists():
        earlier = json.loads(options.out.read_text("utf-8"))
        same = all(earlier[key] == record[key] for key in ("command", "config"))
        record["points"] = earlier["points"] if same else []
    arms = Arms(load_config(options.config))
    for name in options.workloads:
        for in_flight in options.in_flight:
            if any((row["workload"], row["in_flight"]) == (name, in_flight) for row in record["points"]):
                continue
            record["points"].append(point(arms, name, in_flight, options))
            show(record["points"][-1])
            options.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def parse(command: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", choices=[workloads.MIX, *workloads.NAMES], default=[workloads.MIX])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--blocks", type=int, default=10, help="timed blocks a point")
    parser.add_argument("--tuning-blocks", type=int, default=2, help="blocks on which fixed lengths are chosen")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plan-invariant", action="store_true", help="seed sampled requests, so that every arm writes the same text")
    parser.add_argument("--raw", action="store_true", help="send the bare message, without the chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(command)


if __name__ == "__main__":
    main()
