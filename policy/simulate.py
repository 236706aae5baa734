"""Simulate a deployment from latency tables, true acceptance and arrivals, and see what every
policy would make of it.

    spindle simulate compare --deployment llama-8b-h100 --arms none,fixed:eagle:3 --html out.html
    spindle simulate evidence --json simulation.json --html simulation.html
    spindle simulate worth --json worth.json
    spindle simulate fleet --replicas 1,8,1000 --arms none,adaptive
    spindle simulate report FILE.json --html FILE.html

``compare`` runs the arms named. ``evidence`` runs the whole protocol: choices made on some seeds,
reported on others. ``worth`` takes parts of the adaptive planner away, one at a time.
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
from time import perf_counter, process_time
from typing import Any

import numpy as np

from policy.latency import LatencyTable
from policy.simulation import presets
from policy.simulation.arms import WITHOUT, check_arms, known_arms
from policy.simulation.deployment import Deployment
from policy.simulation.evidence import criteria, described
from policy.simulation.experiments import (
    BACKLOG,
    Result,
    Scenario,
    Task,
    compare,
    compare_arms,
    nominal_rate,
    planning_cost,
    run_once,
    summary,
)
from policy.simulation.growth import NOTE, fleet_row
from policy.simulation.report import html, text
from policy.simulation.shift import shift_test
from policy.simulation.workload import Mix, Recorded
from policy.wrappers import PolicyError

TABLES = Path(__file__).parent / "simulation" / "tables"
SHIFT_ARMS = ["adaptive", "smartspec:eagle", "ema:eagle"]
TUNING, REPORTING = [0], [3, 4, 5]
LOADS = [0.3, 0.95, BACKLOG]
REQUESTS = 60


def deployments() -> dict[str, Deployment]:
    """Return the presets by name."""
    tables = {
        name: LatencyTable.from_dict(json.loads((TABLES / f"smollm2-cpu-{name}.json").read_text()))
        for name in ("target", "head")
    }
    plain = presets.llama_8b_h100(), presets.llama_70b_h100(), presets.smollm2_cpu(tables)
    specialists, _ = presets.specialists(0.85, 0.40)
    return {d.name: d for d in (*plain, specialists)}


def mixes() -> dict[str, Mix]:
    """Return the mixes by name."""
    _, mix = presets.specialists(0.85, 0.40)
    return presets.MIXES | {mix.name: mix}


class Runner:
    """Runs tasks in several processes, and counts simulated steps and the seconds that they took.

    Progress goes to stderr: one line that is rewritten, or a line a scenario where it is no
    terminal.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs, self.steps, self.wall_s = jobs, 0, 0.0
        self._pool = ProcessPoolExecutor(jobs)

    def __call__(self, scenario: Scenario, tasks: list[Task]) -> dict[Task, Result]:
        """Return the results of all tasks."""
        started, results = perf_counter(), {}
        found = self._pool.map(partial(_run, scenario), tasks)
        for done, (task, result) in enumerate(zip(tasks, found, strict=True), 1):
            results[task] = result
            if sys.stderr.isatty():
                bar = "#" * (30 * done // len(tasks))
                line = f"\r{scenario.name:18} [{bar:30}] {done}/{len(tasks)} {task.arm:24}"
                print(line, end="", file=sys.stderr, flush=True)
        self.wall_s += perf_counter() - started
        self.steps += sum(result.steps for result in results.values())
        speed = f"{len(tasks)} runs, {self.steps / self.wall_s:,.0f} steps/s so far"
        clear = "\r" + 90 * " " + "\r" if sys.stderr.isatty() else ""
        print(f"{clear}  {scenario.name}: {speed}", file=sys.stderr)
        return results

    def map(self, function: Any, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return the function's values, in order."""
        futures = [self._pool.submit(function, *values) for values in arguments]
        return [future.result() for future in futures]

    def document(self) -> dict[str, Any]:
        """Return what is said of a document's making."""
        return {
            "command": "spindle simulate " + " ".join(sys.argv[1:]),
            "numpy": np.__version__,
            "jobs": self.jobs,
            "steps": self.steps,
            "wall_s": round(self.wall_s, 1),
            "steps_per_s": round(self.steps / max(self.wall_s, 1e-9), 1),
        }


def _run(scenario: Scenario, task: Task) -> Result:
    return summary(run_once(scenario, task))


def scenarios(requests: int) -> dict[str, Scenario]:
    """Return the scenarios of the evidence."""
    known = deployments()
    small, large, cpu = (known[n] for n in ("llama-8b-h100", "llama-70b-4xh100", "smollm2-cpu"))
    chunked = replace(small, prefill_chunk_tokens=512)
    table: list[tuple[str, Deployment, Mix]] = [
        ("8b-chat", small, presets.CHAT),
        ("8b-mix", small, presets.MIXED),
        ("8b-prefill-heavy", chunked, presets.PREFILL_HEAVY),
        ("70b-mix", large, presets.MIXED),
        ("70b-mix-tagged", large, presets.TAGGED),
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


def _charged(scenario: Scenario) -> Scenario:
    """Return the scenario with what planning takes on this machine."""
    cost = planning_cost(scenario.deployment, scenario.mix)
    return replace(scenario, deployment=replace(scenario.deployment, planning_s=cost))


def evidence(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the protocol over the scenarios asked for, planning charged, and the shift test."""
    known, began_s = scenarios(options.requests), process_time()
    small = deployments()["llama-8b-h100"]
    cases = [(small, SHIFT_ARMS, REPORTING[0], tokens, 0.2, 6.0) for tokens in (6000, 100)]
    document: dict[str, Any] = {"comparisons": []}
    document["shift"] = [row for rows in run.map(shift_test, cases) for row in rows]
    for name in options.scenarios or known:
        scenario = _charged(known[name])
        scenario = replace(scenario, rate_hz=nominal_rate(scenario, TUNING, run))
        comparison = compare(scenario, LOADS, TUNING, REPORTING, run)
        document["comparisons"].append(described(comparison, TUNING, REPORTING))
        print(text(document["comparisons"][-1]) + "\n", flush=True)
        document |= {**run.document(), "criteria": criteria(document["comparisons"])}
        write(options, document)
    print(f"{process_time() - began_s:.0f} CPU seconds here, more in {run.jobs} processes")
    return document


def worth_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Take parts of the adaptive planner away, one at a time, planning charged."""
    known = scenarios(options.requests)
    document: dict[str, Any] = {"comparisons": []}
    arms = [f"without:{part}" for part in options.parts or WITHOUT]
    for name in options.scenarios or known:
        scenario = _charged(known[name])
        scenario = replace(scenario, rate_hz=nominal_rate(scenario, TUNING, run))
        comparison = compare_arms(scenario, LOADS, arms, options.seeds, run)
        document["comparisons"].append(described(comparison, [], options.seeds))
        print(text(document["comparisons"][-1]) + "\n", flush=True)
        document |= run.document()
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
    planning_s = ((1, options.planning_us / 1e6),) if options.planning_us else ()
    deployment = replace(deployments()[options.deployment], planning_s=planning_s)
    scenario = Scenario(
        f"{deployment.name}-{options.mix}",
        deployment,
        mixes()[options.mix],
        variation=options.variation,
        requests=options.requests,
        table_error=options.table_error,
        recorded=recorded(options.arrivals) if options.arrivals else None,
    )
    arms = options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    found = compare_arms(scenario, options.rates, arms, options.seeds, run)
    comparison = described(found, [], options.seeds)
    print(text(comparison))
    return {**run.document(), "comparisons": [comparison]}


def fleet_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Simulate fleets of the sizes asked for."""
    deployment = deployments()[options.deployment]
    scenario = Scenario("fleet", deployment, mixes()[options.mix], rate_hz=options.rate)
    sizes = [int(size) for size in options.replicas.split(",")]
    arms = options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    cases = [
        (scenario, arm, size, 1.0, options.requests, options.seed) for size in sizes for arm in arms
    ]
    started = perf_counter()
    rows = run.map(fleet_row, cases)
    run.wall_s, run.steps = perf_counter() - started, sum(row["steps"] for row in rows)
    for row in rows:
        print(json.dumps(row))
    title = f"Fleets of {deployment.name} at {options.rate:g} requests a second each"
    return {**run.document(), "fleet": {"title": title, "note": NOTE, "rows": rows}}


def recorded(path: str) -> Recorded:
    """Read a log of arrivals: a JSON object a line with ``arrival_s``, ``prompt_tokens``,
    ``output_tokens`` and ``category`` (its number).
    """
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    names = ("arrival_s", "prompt_tokens", "output_tokens", "category")
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    if (np.diff(columns["arrival_s"]) < 0).any():
        raise ValueError(f"arrival_s in {path} must not fall")
    return Recorded(**columns)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spindle simulate",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    commands = parser.add_subparsers(dest="command", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, help="write the results here")
    output.add_argument("--html", type=Path, help="write a report here")
    what = argparse.ArgumentParser(add_help=False)
    what.add_argument("--deployment", choices=list(deployments()), default="llama-8b-h100")
    what.add_argument("--mix", choices=list(mixes()), default="mix")
    what.add_argument("--arms", default="none,adaptive", help=f"of {known_arms()}")
    one = commands.add_parser("compare", parents=[output, what], help="arms at request rates")
    one.add_argument("--rates", type=rates, default="5,backlog", help="a second, or backlog")
    about = "of the gaps between arrivals: 1 Poisson, above it bursts"
    one.add_argument("--variation", type=float, default=1.0, help=about)
    one.add_argument("--arrivals", help="a log of requests instead (JSON lines)")
    one.add_argument("--requests", type=int, default=200)
    one.add_argument("--seeds", type=seeds, default="3,4,5")
    one.add_argument("--table-error", type=float, default=0.2)
    about = "what planning adds to a step of policies that predict its time"
    one.add_argument("--planning-us", type=float, default=0.0, help=about)
    several = argparse.ArgumentParser(add_help=False)
    several.add_argument("--requests", type=int, default=REQUESTS)
    several.add_argument("--scenarios", nargs="*", choices=list(scenarios(1)))
    commands.add_parser("evidence", parents=[output, several], help="the whole protocol")
    about = "the adaptive planner without its parts, one at a time"
    worth = commands.add_parser("worth", parents=[output, several], help=about)
    worth.add_argument("--parts", nargs="*", choices=list(WITHOUT), help="all if not given")
    worth.add_argument("--seeds", type=seeds, default="3,4")
    fleet = commands.add_parser("fleet", parents=[output, what], help="replicas behind a router")
    fleet.add_argument("--replicas", default="1,2,4,8,16,32")
    fleet.add_argument("--rate", type=float, default=10.0, help="requests a second and replica")
    fleet.add_argument("--requests", type=int, default=40, help="a replica")
    fleet.add_argument("--seed", type=int, default=3)
    about = "a report of results that were kept"
    again = commands.add_parser("report", parents=[output], help=about)
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
            "worth": worth_command,
            "fleet": fleet_command,
        }
        document = commands[options.command](options, Runner(options.jobs))
        speed = f"{document['steps_per_s']:,.0f} simulated steps a second"
        print(f"{document['steps']:,} steps in {document['wall_s']:g} s: {speed}")
    write(options, document)


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the files that were asked for."""
    if options.json:
        options.json.write_text(lines(document))
    if options.html:
        options.html.write_text(html(document))


def lines(document: dict[str, Any]) -> str:
    """Return a document as JSON, one element of its lists a line, to be read and compared."""

    def value(item: Any) -> str:
        if isinstance(item, list) and item and isinstance(item[0], dict):
            return "[\n" + ",\n".join(json.dumps(element) for element in item) + "\n]"
        return json.dumps(item)

    members = (f"{json.dumps(name)}: {value(item)}" for name, item in document.items())
    return "{\n" + ",\n".join(members) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
