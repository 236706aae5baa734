"""Simulate a deployment from latency tables, true acceptance and arrivals, and see what every policy would make of it.

    spindle simulate compare --deployment llama-8b-h100 --mix mix --rates 4,12,backlog --arms none,fixed:eagle:3 --html out.html
    spindle simulate evidence --json docs/results/simulation.json --html docs/results/simulation.html
    spindle simulate fleet --replicas 1,8,1000 --arms none,adaptive
    spindle simulate shapes --cases cohorts --json out.json --html out.html
    spindle simulate regret --json docs/results/regret.json --html docs/results/regret.html
    spindle simulate report FILE.json --html FILE.html

``compare`` runs what it is told. ``evidence`` runs the whole protocol: choices made on some seeds, reported on others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from policy.custom import PolicyError
from policy.latency import LatencyTable
from policy.simulation import presets, shape_cases
from policy.simulation.arms import KNOWN, check_arms
from policy.simulation.deployment import Deployment
from policy.simulation.evidence import criteria, described
from policy.simulation.experiments import BACKLOG, Result, Scenario, Task, compare, compare_arms, nominal_rate, run_once, summary
from policy.simulation.growth import NOTE, fleet_row
from policy.simulation.regret import ABLATIONS, SELECTIONS, regret, steady
from policy.simulation.report import html, regret_text, text
from policy.simulation.shift import shift_test
from policy.simulation.workload import Recorded

TABLES = Path(__file__).parent / "simulation" / "tables"
REGRET_SCENARIOS = ["70b-mix", "70b-mix-steady", "70b-mix-tagged", "70b-mix-tagged-steady"]
SHIFT_ARMS = ["adaptive", "smartspec:eagle", "ema:eagle"]
TUNING, REPORTING = [0, 1, 2], [3, 4, 5]


def deployments() -> dict[str, Deployment]:
    """Return the presets by name."""
    tables = {name: LatencyTable.from_dict(json.loads((TABLES / f"smollm2-cpu-{name}.json").read_text())) for name in ("target", "small")}
    return {d.name: d for d in (presets.llama_8b_h100(), presets.llama_70b_h100(), presets.smollm2_cpu(tables))}


class Runner:
    """Runs tasks in several processes, and counts simulated steps and the seconds that they took."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.steps, self.wall_s = jobs, 0, 0.0
        self._pool = ProcessPoolExecutor(jobs)

    def __call__(self, scenario: Scenario, tasks: list[Task]) -> dict[Task, Result]:
        """Return the results of all tasks."""
        started = perf_counter()
        results = dict(zip(tasks, self._pool.map(partial(_run, scenario), tasks), strict=True))
        self.wall_s += perf_counter() - started
        self.steps += sum(result.steps for result in results.values())
        print(f"  {scenario.name}: {len(tasks)} runs, {self.steps / self.wall_s:,.0f} steps/s so far", file=sys.stderr)
        return results

    def map(self, function: Any, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return the function's values, in order."""
        return [future.result() for future in [self._pool.submit(function, *values) for values in arguments]]

    def document(self) -> dict[str, Any]:
        """Return what is said of a document's making."""
        command = "spindle simulate " + " ".join(sys.argv[1:])
        speed = {"steps": self.steps, "wall_s": round(self.wall_s, 1), "steps_per_s": round(self.steps / max(self.wall_s, 1e-9), 1)}
        return {"command": command, "numpy": np.__version__, "jobs": self.jobs, **speed}


def _run(scenario: Scenario, task: Task) -> Result:
    return summary(run_once(scenario, task))


def scenarios(requests: int) -> dict[str, tuple[Scenario, list[float]]]:
    """Return the scenarios of the evidence with their loads."""
    known, loads = deployments(), [0.2, 0.5, 0.8, BACKLOG]
    small, large, cpu = known["llama-8b-h100"], known["llama-70b-4xh100"], known["smollm2-cpu"]
    chunked = replace(small, prefill_chunk_tokens=512)
    table = [
        (Scenario("8b-chat", small, presets.CHAT, requests=requests), loads),
        (Scenario("8b-mix", small, presets.MIXED, requests=requests), loads),
        (Scenario("70b-mix", large, presets.MIXED, requests=requests), loads),
        (Scenario("70b-mix-tagged", large, presets.TAGGED, requests=requests), loads),
        (Scenario("cpu-mix", cpu, presets.MIXED, requests=requests), loads),
        (Scenario("70b-mix-bursty", large, presets.MIXED, variation=3.0, requests=requests), [0.5]),
        (Scenario("8b-prefill-heavy", chunked, presets.PREFILL_HEAVY, requests=requests), [0.5, 0.8, BACKLOG]),
        (Scenario("cpu-prefill-heavy", cpu, presets.PREFILL_HEAVY, requests=requests), [0.5, 0.8, BACKLOG]),
    ]
    return {scenario.name: (scenario, points) for scenario, points in table}


def evidence(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the protocol over the scenarios asked for, and the shift test."""
    small = deployments()["llama-8b-h100"]
    cases = [(small, SHIFT_ARMS, seed, tokens, 0.2, 6.0) for tokens in (6000, 100) for seed in REPORTING]
    document: dict[str, Any] = {"comparisons": [], "shift": [row for rows in run.map(shift_test, cases) for row in rows]}
    known = scenarios(options.requests)
    for name in options.scenarios or known:
        scenario, loads = known[name]
        scenario = replace(scenario, rate_hz=nominal_rate(scenario, TUNING[:1], run), equal_time=True)
        document["comparisons"].append(described(compare(scenario, loads, TUNING, REPORTING, run), TUNING, REPORTING))
        print(text(document["comparisons"][-1]) + "\n", flush=True)
        document |= {**run.document(), "criteria": criteria(document["comparisons"])}
        write(options, document)
    return document


def rates(text: str) -> list[float]:
    """Return the loads of a list like ``3,8,backlog``. Raises ValueError, which argparse tells."""
    found = [BACKLOG if rate == "backlog" else float(rate) for rate in text.split(",")]
    if any(rate < 0 for rate in found):
        raise ValueError("a rate below 0")
    return found


def seeds(text: str) -> list[int]:
    """Return the seeds of a list like ``3,4,5``. Raises ValueError, which argparse tells."""
    return [int(seed) for seed in text.split(",")]


def compare_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the arms asked for at the rates asked for."""
    deployment = replace(deployments()[options.deployment], planning_s=options.planning_us / 1e6)
    scenario = Scenario(f"{deployment.name}-{options.mix}", deployment, presets.MIXES[options.mix])
    scenario = replace(scenario, variation=options.variation, requests=options.requests, table_error=options.table_error)
    scenario = replace(scenario, recorded=recorded(options.arrivals) if options.arrivals else None)
    loads, seeds, arms = options.rates, options.seeds, options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    comparison = described(compare_arms(scenario, loads, arms, seeds, run), [], seeds)
    print(text(comparison))
    return {**run.document(), "comparisons": [comparison]}


def fleet_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Simulate fleets of the sizes asked for."""
    deployment = deployments()[options.deployment]
    scenario = Scenario("fleet", deployment, presets.MIXES[options.mix], rate_hz=options.rate)
    sizes, arms = [int(size) for size in options.replicas.split(",")], options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    cases = [(scenario, arm, size, 1.0, options.requests, options.seed) for size in sizes for arm in arms]
    started = perf_counter()
    rows = run.map(fleet_row, cases)
    run.wall_s, run.steps = perf_counter() - started, sum(row["steps"] for row in rows)
    for row in rows:
        print(json.dumps(row))
    title = f"Fleets of {deployment.name} at {options.rate:g} requests a second each"
    return {**run.document(), "fleet": {"title": title, "note": NOTE, "rows": rows}}


def shapes_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the cases of cohorts and cut contexts asked for."""
    known = shape_cases.cases()
    names = options.cases.split(",") if options.cases else list(known)
    if unknown := set(names) - set(known):
        raise ValueError(f"cases must be of {list(known)}, got {sorted(unknown)}")
    seeds = options.seeds
    started = perf_counter()
    points = shape_cases.run_cases(known, names, seeds, run.map)
    run.wall_s, run.steps = perf_counter() - started, sum(point["steps"] for point in points)
    for point in points:
        print(json.dumps(point))
    titles = {name: known[name][0] for name in names}
    return {**run.document(), "shapes": {"titles": titles, "seeds": seeds, "points": points}}


def regret_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the ways to learn asked for, on mixes that drift and that do not, with tags of the requests' kinds and without."""
    known, seeds = scenarios(options.requests), options.seeds
    rate_hz = options.rate or nominal_rate(known["70b-mix"][0], seeds[:1], run)
    document: dict[str, Any] = {"regret": []}
    for name in options.scenarios or REGRET_SCENARIOS:
        scenario = replace(known[name.removesuffix("-steady")][0], name=name, rate_hz=rate_hz, table_error=0.0)
        if name.endswith("-steady"):
            scenario = replace(scenario, mix=steady(scenario.mix))
        document["regret"].append(regret(scenario, options.load, seeds, run, options.ways or [*SELECTIONS, *ABLATIONS]))
        print(regret_text(document["regret"][-1]) + "\n", flush=True)
        document |= run.document()
        write(options, document)
    return document


def recorded(path: str) -> Recorded:
    """Read a log of arrivals: a JSON object a line with ``arrival_s``, ``prompt_tokens``, ``output_tokens``, ``category`` (its number)."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    columns = {name: np.array([row[name] for row in rows]) for name in ("arrival_s", "prompt_tokens", "output_tokens", "category")}
    if (np.diff(columns["arrival_s"]) < 0).any():
        raise ValueError(f"arrival_s in {path} must not fall")
    return Recorded(**columns)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spindle simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    commands = parser.add_subparsers(dest="command", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, help="write the results here")
    output.add_argument("--html", type=Path, help="write a report here")
    what = argparse.ArgumentParser(add_help=False)
    what.add_argument("--deployment", choices=list(deployments()), default="llama-8b-h100")
    what.add_argument("--mix", choices=list(presets.MIXES), default="mix")
    what.add_argument("--arms", default="none,adaptive", help=f"of {KNOWN}")
    one = commands.add_parser("compare", parents=[output, what], help="arms at request rates")
    one.add_argument("--rates", type=rates, default="5,backlog", help="requests a second, or backlog")
    one.add_argument("--variation", type=float, default=1.0, help="of the gaps between arrivals: 1 Poisson, above it bursts")
    one.add_argument("--arrivals", help="a log of requests instead (JSON lines)")
    one.add_argument("--requests", type=int, default=200)
    one.add_argument("--seeds", type=seeds, default="3,4,5")
    one.add_argument("--table-error", type=float, default=0.2)
    one.add_argument("--planning-us", type=float, default=0.0, help="what planning adds to a step of policies that predict its time")
    all_of_it = commands.add_parser("evidence", parents=[output], help="the whole protocol")
    all_of_it.add_argument("--requests", type=int, default=200)
    all_of_it.add_argument("--scenarios", nargs="*", choices=list(scenarios(1)))
    fleet = commands.add_parser("fleet", parents=[output, what], help="replicas behind a router")
    fleet.add_argument("--replicas", default="1,2,4,8,16,32")
    fleet.add_argument("--rate", type=float, default=10.0, help="requests a second and replica")
    fleet.add_argument("--requests", type=int, default=40, help="a replica")
    fleet.add_argument("--seed", type=int, default=3)
    about = "cohorts and cut contexts against plain chains"
    shapes = commands.add_parser("shapes", parents=[output], help=about)
    shapes.add_argument("--cases", help="which, all if not given")
    shapes.add_argument("--seeds", type=seeds, default="0,1,2")
    learning = commands.add_parser("regret", parents=[output], help="what ways to learn lose to the oracle")
    learning.add_argument("--scenarios", nargs="*", choices=REGRET_SCENARIOS)
    learning.add_argument("--ways", nargs="*", choices=[*SELECTIONS, *ABLATIONS], help="all if not given")
    learning.add_argument("--rate", type=float, help="requests a second at load 1; measured if not given")
    learning.add_argument("--load", type=float, default=0.5)
    learning.add_argument("--requests", type=int, default=150)
    learning.add_argument("--seeds", type=seeds, default="0,1,2")
    again = commands.add_parser("report", parents=[output], help="a report of results that were kept")
    again.add_argument("file", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and write what was asked for; returns 2 for a policy that cannot be run."""
    options = _options(arguments)
    if not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.append(str(Path.cwd()))  # where a user's policy may lie
    try:
        _main(options)
    except PolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _main(options: argparse.Namespace) -> None:
    if options.command == "report":
        document = json.loads(options.file.read_text())
    else:
        commands = {
            "compare": compare_command,
            "evidence": evidence,
            "fleet": fleet_command,
            "shapes": shapes_command,
            "regret": regret_command,
        }
        document = commands[options.command](options, Runner(options.jobs))
        print(f"{document['steps']:,} steps in {document['wall_s']:g} s: {document['steps_per_s']:,.0f} simulated steps a second")
    write(options, document)


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the files that were asked for."""
    if options.json:
        options.json.write_text(lines(document))
    if options.html:
        options.html.write_text(html(document))


def lines(document: dict[str, Any]) -> str:
    """Return a document as JSON with one element of its lists a line, to be read and compared by eye."""

    def value(item: Any) -> str:
        if isinstance(item, list) and item and isinstance(item[0], dict):
            return "[\n" + ",\n".join(json.dumps(element) for element in item) + "\n]"
        return json.dumps(item)

    return "{\n" + ",\n".join(f"{json.dumps(name)}: {value(item)}" for name, item in document.items()) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
