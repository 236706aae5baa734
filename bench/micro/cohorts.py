"""Cohorts forced to two, left to the policy, and off: ``python -m bench.micro.cohorts
--config FILE --out FILE``.

In this process, wall time, one torch thread for drafting and one for verifying. Arms: ``one`` (a
deployment without cohorts) and ``two`` (every batch cut) with the same fixed draft and length;
``unused``, the deployment with cohorts whose plans have none, which is what a thread of its own
costs; ``planned`` and ``planned two``, the adaptive policy without cohorts and with them where it
thinks that they pay. Blocks of requests, each arm in turn (ABBA), the first warms up; a ratio is
that of tokens per second in the same block, its interval the bootstrap's over blocks. Cohorts
overlap only where a second core is free: ``load`` is how busy the machine was.

``--phases`` needs no free core: the CPU time of a verification and of the draft's run behind it, of
a batch and of half of it, interleaved. Two cohorts take 2 max(D, V) of the half where one takes D +
V of the whole; that ratio is the most they could gain, contending for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from backend import machine
from backend.app import App, build
from backend.config import ServingConfig, load_config
from backend.core.session import Session
from backend.engines.contention import repeated
from backend.model_folders import model_path
from backend.policy_factory import make_policy
from backend.request import GenerationRequest
from backend.storage.tables import load_tables, timed_engines
from bench import workloads
from bench.in_process import Sink
from bench.paired import abba, median_interval
from policy import FixedLength, Plan, Policy, View
from tests.forced_cohorts import ForcedCohorts

PAIRS = (("two", "one"), ("unused", "one"), ("planned two", "planned"))


@dataclass
class Arm(Policy):
    """A deployment with a policy of its own, whose state outlasts a block, and what it planned."""

    app: App
    policy: Policy
    state: Any = None
    plans: list[Plan] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def start(self) -> Any:
        """Return the policy's."""
        return self.policy.start()

    def plan(
        self, view: View, state: Any, now: float, rng: np.random.Generator
    ) -> tuple[Plan, Any]:
        """Plan, and note it."""
        plan, state = self.policy.plan(view, state, now, rng)
        self.plans.append(plan)
        return plan, state

    def observe(self, outcome: Any, state: Any, now: float) -> Any:
        """Let the policy learn."""
        return self.policy.observe(outcome, state, now)

    def stand_by(self, view: View, state: Any) -> Any:
        """Return the policy's."""
        return self.policy.stand_by(view, state)

    def drift(self, state: Any) -> dict[str, float]:
        """Return the policy's."""
        return self.policy.drift(state)

    def serve(self, requests: Sequence[GenerationRequest], in_flight: int) -> float:
        """Serve requests, so many at a time, and return tokens per second of wall time."""
        loop = self.app.orchestrator
        waiting, running, sessions = (
            [self.app.session(request, Sink()) for request in requests],
            list[Session](),
            list[Session](),
        )
        kept = loop.planning.change(self, self.state or self.start())
        started_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < in_flight:
                running.append(waiting.pop(0))
                sessions.append(running[-1])
                loop.submit(running[-1])
            loop.step()
            running = [session for session in running if not session.sink.ended]  # type: ignore[attr-defined]
        while loop.step():
            pass
        seconds = time.perf_counter() - started_s
        _, self.state = loop.planning.change(*kept)
        return sum(session.output_tokens for session in sessions) / seconds

    def summary(self) -> dict[str, Any]:
        """Return the rate, the share of plans in cohorts, and the commonest reasons against
        them.
        """
        speculating = [plan for plan in self.plans if len(plan.length)]
        cut = [plan for plan in speculating if plan.flight is not None]
        reasons = [plan.notes.get("why_not", {}).get("cohorts", "") for plan in speculating]
        kinds = sorted({reason.split(":")[0] for reason in reasons if reason})
        shares = {
            kind: round(sum(reason.startswith(kind) for reason in reasons) / len(reasons), 3)
            for kind in kinds
        }
        return {
            "tokens_per_s": round(median(self.rates), 2),
            "in_cohorts": round(len(cut) / max(len(speculating), 1), 3),
            "why_not": shares,
        }


def phases(config: ServingConfig, draft: str, rounds: int) -> list[dict[str, float]]:
    """Return the medians in ms by batch size, and the most that two cohorts could gain."""
    app = build(replace(config, policy=replace(config.policy, kind="none")), {})
    engines = {
        "verify": app.target,
        "draft": app.drafts[app.orchestrator._drafting.names.index(draft)],
    }
    times: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        runs = {
            (phase, rows): stack.enter_context(
                repeated(engine, verifies=phase == "verify", rows=rows)
            )
            for rows in (1, 2, 4, 8, 16)
            for phase, engine in engines.items()
        }
        for number in range(rounds + 1):
            for key, run in runs.items() if number % 2 else reversed(runs.items()):
                started_s = time.thread_time()
                run()
                if number:
                    times.setdefault(key, []).append(1e3 * (time.thread_time() - started_s))
    found = []
    for rows in (2, 4, 8, 16):
        whole, half = (
            {phase: median(times[phase, n]) for phase in engines} for n in (rows, rows // 2)
        )
        most = sum(whole.values()) / (2 * max(half.values()))
        times_ms = {f"{phase}_ms": round(value, 2) for phase, value in whole.items()}
        found.append(
            {
                "rows": rows,
                **times_ms,
                **{f"{p}_half_ms": round(v, 2) for p, v in half.items()},
                "most_gain": round(most, 3),
            }
        )
    return found


def arms_of(
    config: ServingConfig, draft: str, length: int
) -> tuple[dict[str, Callable[[], Arm]], float | None]:
    """Return how to make the arms, and the contention that was measured."""
    config = replace(config, policy=replace(config.policy, keep_learned=False, trace_file=""))
    tables, _ = load_tables(
        config, {engine.name: model_path(engine) for engine in timed_engines(config)}
    )
    alone, cut = (
        build(replace(config, policy=replace(config.policy, cohorts=n)), tables) for n in (1, 2)
    )

    def planned(app: App) -> Arm:
        return Arm(app, make_policy(app.config, app.drafts, tables, app.step_stats, app.contention))

    made: dict[str, Callable[[], Arm]] = {
        "one": lambda: Arm(alone, FixedLength(draft, length)),
        "two": lambda: Arm(cut, ForcedCohorts(FixedLength(draft, length), 2)),
        "unused": lambda: Arm(cut, FixedLength(draft, length)),
        "planned": lambda: planned(alone),
        "planned two": lambda: planned(cut),
    }
    return made, cut.contention


def point(
    made: dict[str, Callable[[], Arm]],
    in_flight: int,
    config: ServingConfig,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure all arms at one load."""
    arms = {name: make() for name, make in made.items()}
    size = options.per_block * in_flight
    messages, folder = (
        workloads.load(options.workload, size * (options.blocks + 1), options.seed).messages,
        model_path(config.target),
    )
    loads = []
    for block in range(options.blocks + 1):
        texts = (messages[(block * size + i) % len(messages)] for i in range(size))
        requests = [
            GenerationRequest(workloads.render(text, folder), options.max_tokens) for text in texts
        ]
        for name in abba(list(arms), block):
            own = [
                replace(request, cache_salt=f"{block}/{name}") for request in requests
            ]  # arms share engines, and must share no KV
            rate = arms[name].serve(own, in_flight)
            if block:
                arms[name].rates.append(rate)
            else:
                arms[name].plans.clear()
        loads.append(os.getloadavg()[0])
    ratios = {}
    for over, under in PAIRS:
        pairs = [
            one / other for one, other in zip(arms[over].rates, arms[under].rates, strict=True)
        ]
        low, high = median_interval(pairs, options.seed)
        ratios[f"{over} / {under}"] = [round(median(pairs), 3), round(low, 3), round(high, 3)]
    summaries = {name: arm.summary() for name, arm in arms.items()}
    return {
        "in_flight": in_flight,
        "ratios": ratios,
        "arms": summaries,
        "load": round(median(loads), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every load and write the record after each."""
    command = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(command)
    config = load_config(options.config)
    if options.phases:
        found = phases(config, options.draft, options.phases)
        print(json.dumps(found, indent=1))
        earlier = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
        measured = {
            "draft": options.draft,
            "rounds": options.phases,
            "machine": machine.describe(),
            "by_rows": found,
        }
        options.out.write_text(
            json.dumps({**earlier, "phases": measured}, indent=1) + "\n", "utf-8"
        )
        return
    made, contention = arms_of(config, options.draft, options.length)
    record: dict[str, Any] = {
        "benchmark": "cohorts: two against one, and the policy deciding",
        "command": ["python", "-m", "bench.micro.cohorts", *command],
        "machine": machine.describe(),
        "config": json.loads(options.config.read_text("utf-8")),
        "seed": options.seed,
        "contention": contention,
        "points": [],
    }
    for in_flight in options.in_flight:
        record["points"].append(point(made, in_flight, config, options))
        print(json.dumps(record["points"][-1]), flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def parse(command: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--workload", choices=[workloads.MIX, *workloads.NAMES], default=workloads.MIX
    )
    parser.add_argument("--draft", default="large", help="of the arms with a fixed choice")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--in-flight", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--blocks", type=int, default=6, help="timed blocks a load")
    parser.add_argument(
        "--per-block", type=int, default=1, help="requests for each that is in flight"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--phases", type=int, default=0, help="measure the phases alone, in so many rounds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(command)


if __name__ == "__main__":
    main()
