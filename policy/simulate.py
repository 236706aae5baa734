"""Compare policies on a simulated deployment: latency tables, true acceptance, arrivals.

example: spindle simulate compare --deployment smollm2-cpu --arms none,fixed:suffix:3,adaptive
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from policy.custom import PolicyError
from policy.latency import LatencyTable
from policy.loops import compiling
from policy.simulation import presets
from policy.simulation.advised import read_advice
from policy.simulation.arms import check_arms, known_arms
from policy.simulation.deployment import Deployment
from policy.simulation.experiments import (
    BACKLOG,
    Result,
    Scenario,
    Task,
    compare_arms,
    run_once,
    summary,
)
from policy.simulation.report import describe, text
from policy.simulation.workload import Mix, RequestLog

TABLES = Path(__file__).parent / "simulation" / "tables"


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


def mix_for(deployment: Deployment, name: str | None) -> Mix:
    """Return the mix of a name, or the one that suits the deployment. Raises ValueError for a mix
    without its drafts.
    """
    drafts = set(deployment.drafts)
    suiting = [
        mix for mix in mixes().values() if all(drafts <= set(c.hazard) for c in mix.categories)
    ]
    names = [mix.name for mix in suiting]
    name = name or ("mix" if "mix" in names else names[0])
    if name not in names:
        choices = " or ".join(names)
        raise ValueError(f"--mix {name} lacks drafts of {deployment.name}: use {choices}")
    return suiting[names.index(name)]


class Runner:
    """Runs tasks in several processes, and counts simulated steps and the seconds that they took. A
    ``with`` ends the processes.

    Progress goes to stderr: one line that is rewritten, or a line a scenario where it is no
    terminal.
    """

    def __init__(self, jobs: int, program: str = "spindle simulate") -> None:
        self.jobs, self.program, self.steps, self.wall_s = jobs, program, 0, 0.0
        if not compiling.is_cached():
            print("compiling the planner, about 30 s at the first start", file=sys.stderr)
        compiling.compile_all()  # before the processes fork
        self._pool = ProcessPoolExecutor(jobs)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def __call__(self, scenario: Scenario, tasks: list[Task]) -> dict[Task, Result]:
        """Return the results of all tasks."""
        started, results = perf_counter(), {}
        pairs = self._pool.map(partial(_run, scenario), tasks)
        for done, (task, result) in enumerate(zip(tasks, pairs, strict=True), 1):
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
            "command": f"{self.program} {' '.join(sys.argv[1:])}",
            "numpy": np.__version__,
            "jobs": self.jobs,
            "steps": self.steps,
            "wall_s": round(self.wall_s, 1),
            "steps_per_s": round(self.steps / max(self.wall_s, 1e-9), 1),
        }


def _run(scenario: Scenario, task: Task) -> Result:
    return summary(run_once(scenario, task))


def rates(text: str) -> list[float]:
    """Return the loads of a list like ``3,8,backlog``. Raises ValueError, which argparse tells."""
    values = [BACKLOG if rate == "backlog" else float(rate) for rate in text.split(",")]
    if any(rate < 0 for rate in values):
        raise ValueError("a rate below 0")
    return values


def seeds(text: str) -> list[int]:
    """Return the seeds of a list like ``3,4,5``. Raises ValueError, which argparse tells."""
    return [int(seed) for seed in text.split(",")]


def compare_command(options: argparse.Namespace, run: Runner) -> dict[str, Any]:
    """Run the arms asked for at the rates asked for."""
    planning_s = ((1, options.planning_us / 1e6),) if options.planning_us else ()
    if options.advice:
        deployment, mix = read_advice(options.advice)
    else:
        deployment = deployments()[options.deployment]
        mix = mix_for(deployment, options.mix)
    deployment = replace(deployment, planning_s=planning_s)
    scenario = Scenario(
        f"{deployment.name}-{mix.name}",
        deployment,
        mix,
        variation=options.variation,
        requests=options.requests,
        table_error=options.table_error,
        recorded=read_recording(options.arrivals) if options.arrivals else None,
    )
    arms = options.arms.split(",")
    check_arms(arms, deployment, scenario.mix)
    results = compare_arms(scenario, options.rates, arms, options.seeds, run)
    comparison = describe(results, [], options.seeds)
    print(text(comparison))
    return {**run.document(), "comparisons": [comparison]}


def read_recording(path: str) -> RequestLog:
    """Read a log of arrivals: a JSON object a line with ``arrival_s``, ``prompt_tokens``,
    ``output_tokens`` and ``category`` (its number).
    """
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    names = ("arrival_s", "prompt_tokens", "output_tokens", "category")
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    if (np.diff(columns["arrival_s"]) < 0).any():
        raise ValueError(f"arrival_s in {path} must not fall")
    return RequestLog(**columns)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spindle simulate",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compare", help="policies at one or more loads")
    one.add_argument("--json", type=Path, help="write the results here")
    about = "the server that `spindle advise` measured: advice.json; its draft is called draft"
    one.add_argument("--from", dest="advice", type=Path, metavar="FILE", help=about)
    add_deployment(one)
    about = "requests per second, or backlog; default: 5,backlog"
    one.add_argument("--rates", type=rates, default="5,backlog", help=about)
    about = "variation of the gaps between arrivals: 1 (default) for Poisson, more for bursts"
    one.add_argument("--variation", type=float, default=1.0, help=about)
    about = "replay a log of requests (JSON lines) instead"
    one.add_argument("--arrivals", metavar="FILE", help=about)
    about = "requests at each load; default: 200"
    one.add_argument("--requests", type=int, default=200, help=about)
    about = "one run for each; default: 3,4,5"
    one.add_argument("--seeds", type=seeds, default="3,4,5", help=about)
    about = "how far the policies' latency tables are off, as a share; default: 0.2"
    one.add_argument("--table-error", type=float, default=0.2, help=about)
    about = "microseconds that planning adds to a step of policies that predict times; default: 0"
    one.add_argument("--planning-us", type=float, default=0.0, help=about)
    return parser.parse_args(arguments)


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is simulated."""
    about = "model, hardware and drafts; default: llama-8b-h100"
    names = list(deployments())
    parser.add_argument("--deployment", choices=names, default="llama-8b-h100", help=about)
    about = "kinds of requests; default: the deployment's"
    parser.add_argument("--mix", choices=list(mixes()), help=about)
    about = f"policies to compare (default: none,adaptive), out of {known_arms()}"
    parser.add_argument("--arms", default="none,adaptive", help=about)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and write its results; returns 2 for a policy or file that is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(["compare", *words] if words[:1] == ["--from"] else words)
    with Runner(options.jobs) as runner:
        return run(options, lambda: compare_command(options, runner))


def run(
    options: argparse.Namespace,
    command: Callable[[], dict[str, Any]],
    write: Callable[[Path, dict[str, Any]], None] | None = None,
) -> int:
    """Run a command and ``write`` its results to ``options.json``, without ``write`` as JSON lines.
    Returns 2 for a policy or file that is wrong.
    """
    if not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.append(str(Path.cwd()))  # where a user's policy may lie
    try:
        document = command()
    except (PolicyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    speed = f"{document['steps_per_s']:,.0f} simulated steps a second"
    print(f"{document['steps']:,} steps in {document['wall_s']:g} s: {speed}")
    if options.json and write:
        write(options.json, document)
    elif options.json:
        options.json.write_text(lines(document), "utf-8")
    return 0


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
