"""The simulator's evidence: ``python -m bench.simulator COMMAND``.

    python -m bench.simulator evidence --json simulation.json
    python -m bench.simulator worth --json worth.json
    python -m bench.simulator fleet --replicas 1,8,1000 --arms none,adaptive
    python -m bench.simulator guard --json guard.json

``evidence`` runs the whole protocol: choices made on some seeds, reported on others. ``worth``
takes parts of the adaptive planner away, one at a time. ``fleet`` puts replicas after a router.
``guard`` makes passes with proposals dearer than the tables say.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from bench import records
from bench.simulator.criteria import criteria, describe
from bench.simulator.growth import NOTE, fleet_row
from bench.simulator.guard import guard_row, summary
from bench.simulator.protocol import compare, nominal_rate, planning_cost
from bench.simulator.shift import shift_test
from policy.simulate import Runner, add_deployment, deployments, mix_for, run, seeds
from policy.simulation import presets
from policy.simulation.arms import WITHOUT, check_arms
from policy.simulation.deployment import Deployment
from policy.simulation.experiments import BACKLOG, Scenario, compare_arms
from policy.simulation.report import text
from policy.simulation.workload import Mix

SHIFT_ARMS = ["adaptive", "smartspec:eagle", "ema:eagle"]
TUNING, REPORTING = [0], [3, 4, 5]
LOADS = [0.3, 0.95, BACKLOG]
REQUESTS = 60


def scenarios(requests: int) -> dict[str, Scenario]:
    """Return the scenarios of the evidence."""
    by_name = deployments()
    small, large, cpu = (by_name[n] for n in ("llama-8b-h100", "llama-70b-4xh100", "smollm2-cpu"))
    chunked = replace(small, prefill_chunk_tokens=512)
    table: list[tuple[str, Deployment, Mix]] = [
        ("8b-chat", small, presets.CHAT),
        ("8b-mix", small, presets.MIXED),
        ("8b-prefill-heavy", chunked, presets.PREFILL_HEAVY),
        ("70b-mix", large, presets.MIXED),
        ("70b-mix-bursty", large, presets.MIXED),
        ("cpu-mix", cpu, presets.MIXED),
        ("cpu-prefill-heavy", cpu, presets.PREFILL_HEAVY),
        ("8b-4-heads", *presets.specialists(0.85, 0.40)),
    ]
    return {
        name: Scenario(
            *(name, deployment, mix),
            variation=3.0 if "bursty" in name else 1.0,
            requests=requests,
        )
        for name, deployment, mix in table
    }


def _with_planning_cost(scenario: Scenario) -> Scenario:
    """Return the scenario with what planning takes on this machine."""
    cost = planning_cost(scenario.deployment, scenario.mix)
    return replace(scenario, deployment=replace(scenario.deployment, planning_s=cost))


def evidence(options: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """Run the protocol over the scenarios asked for, planning charged, and the shift test."""
    by_name, began_s = scenarios(options.requests), process_time()
    small = deployments()["llama-8b-h100"]
    cases = [(small, SHIFT_ARMS, REPORTING[0], tokens, 0.2, 6.0) for tokens in (6000, 100)]
    document: dict[str, Any] = {"comparisons": []}
    document["shift"] = [row for rows in runner.map(shift_test, cases) for row in rows]
    for name in options.scenarios or by_name:
        scenario = _with_planning_cost(by_name[name])
        scenario = replace(scenario, rate_hz=nominal_rate(scenario, TUNING, runner))
        comparison = compare(scenario, LOADS, TUNING, REPORTING, runner)
        document["comparisons"].append(describe(comparison, TUNING, REPORTING))
        print(text(document["comparisons"][-1]) + "\n", flush=True)
        document |= {**runner.document(), "criteria": criteria(document["comparisons"])}
        if options.json:
            records.write(options.json, document)
    print(f"{process_time() - began_s:.0f} CPU seconds here, more in {runner.jobs} processes")
    return document


def worth_command(options: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """Take parts of the adaptive planner away, one at a time, planning charged."""
    by_name = scenarios(options.requests)
    document: dict[str, Any] = {"comparisons": []}
    arms = [f"without:{part}" for part in options.parts or WITHOUT]
    for name in options.scenarios or by_name:
        scenario = _with_planning_cost(by_name[name])
        scenario = replace(scenario, rate_hz=nominal_rate(scenario, TUNING, runner))
        comparison = compare_arms(scenario, LOADS, arms, options.seeds, runner)
        document["comparisons"].append(describe(comparison, [], options.seeds))
        print(text(document["comparisons"][-1]) + "\n", flush=True)
        document |= runner.document()
        if options.json:
            records.write(options.json, document)
    return document


def fleet_command(options: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """Simulate fleets of the sizes asked for."""
    deployment = deployments()[options.deployment]
    scenario = Scenario("fleet", deployment, mix_for(deployment, options.mix), rate_hz=options.rate)
    sizes = [int(size) for size in options.replicas.split(",")]
    arms = options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    cases = [
        (scenario, arm, size, 1.0, options.requests, options.seed) for size in sizes for arm in arms
    ]
    started = perf_counter()
    rows = runner.map(fleet_row, cases)
    runner.wall_s, runner.steps = perf_counter() - started, sum(row["steps"] for row in rows)
    for row in rows:
        print(json.dumps(row))
    title = f"Fleets of {deployment.name} at {options.rate:g} requests a second each"
    return {**runner.document(), "fleet": {"title": title, "note": NOTE, "rows": rows}}


def guard_command(options: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """Simulate the guard at the factors and loads asked for."""
    cases = [
        (deployments()[name], presets.MIXED, factor, in_flight, seed, options.change_tokens)
        for name in options.deployments
        for factor in options.factors
        for in_flight in options.in_flight
        for seed in options.seeds
    ]
    started = perf_counter()
    rows = runner.map(guard_row, cases)
    runner.wall_s, runner.steps = perf_counter() - started, sum(row["steps"] for row in rows)
    cells = summary(rows)
    for row in cells:
        print(json.dumps(row))
    return {**runner.document(), "summary": cells, "rows": rows}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    commands = parser.add_subparsers(dest="command", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, help="write the results here")
    several = argparse.ArgumentParser(add_help=False)
    several.add_argument("--requests", type=int, default=REQUESTS)
    several.add_argument("--scenarios", nargs="*", choices=list(scenarios(1)))
    commands.add_parser("evidence", parents=[output, several], help="the whole protocol")
    about = "the adaptive planner without its parts, one at a time"
    worth = commands.add_parser("worth", parents=[output, several], help=about)
    worth.add_argument("--parts", nargs="*", choices=list(WITHOUT), help="all if not given")
    worth.add_argument("--seeds", type=seeds, default="3,4")
    fleet = commands.add_parser("fleet", parents=[output], help="replicas after a router")
    add_deployment(fleet)
    fleet.add_argument("--replicas", default="1,2,4,8,16,32")
    fleet.add_argument("--rate", type=float, default=10.0, help="requests a second and replica")
    fleet.add_argument("--requests", type=int, default=40, help="a replica")
    fleet.add_argument("--seed", type=int, default=3)
    guard = commands.add_parser("guard", parents=[output], help="where tables are wrong")
    names = list(deployments())
    guard.add_argument("--deployments", nargs="*", choices=names, default=names[:1])
    guard.add_argument("--factors", type=float, nargs="*", default=[1.0, 1.3, 1.8])
    guard.add_argument("--in-flight", type=int, nargs="*", default=[1, 4, 16])
    guard.add_argument("--seeds", type=seeds, default="3,4,5")
    about = "what a pass of another width costs, in tokens"
    guard.add_argument("--change-tokens", type=int, default=0, help=about)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and write what was asked for; returns 2 for a policy that cannot be run."""
    options = _options(arguments)
    commands = {"evidence": evidence, "worth": worth_command, "fleet": fleet_command}
    commands["guard"] = guard_command
    with Runner(options.jobs, "python -m bench.simulator") as runner:
        return run(options, lambda: commands[options.command](options, runner), records.write)


if __name__ == "__main__":
    sys.exit(main())
