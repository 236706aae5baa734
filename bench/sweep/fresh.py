"""Speculation against plain decoding on a fresh server, from its first request on.

    python -m bench.sweep.fresh --out FILE [--closed 1 4 8 16] [--temperatures 0 0.8] [--blocks 6]
    python -m bench.sweep.fresh --table-error 0.25 ...  # served by tables that are wrong
    python -m bench.sweep.fresh --busy ...              # a second program takes half a core
    python -m bench.sweep.fresh --arms none spindle suffix-else-eagle ...

For every point (temperature, requests in flight) each arm but ``none`` gets a new server, which has
learnt nothing; ``none`` has been warmed up. Then come blocks: each arm serves the same requests, in
ABBA order. Ratios are of tokens per second within a block: the first one alone, and their geometric
mean with Student's interval.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend.config import parse_config
from backend.storage import cache
from bench import records
from bench.sweep.arms import NONE, SPINDLE, Servers, Tuning, arm_config
from bench.sweep.figures import speed
from bench.sweep.options import DEFAULT_CONFIG
from bench.sweep.options import parse as parse_sweep
from bench.sweep.run import Sweep
from engines_build.prepare import prepare
from policy.simulation.statistics import abba, ratio_of_rates

VERIFIED = "spindle_drafted_steps_total"
BURST_S = 0.3
"""Mean length of the busy program's bursts and pauses."""
_BUSY = """
import random, sys, time
rng = random.Random(int(sys.argv[1]))
while True:
    until_s = time.monotonic() + rng.expovariate(1 / float(sys.argv[2]))
    while time.monotonic() < until_s:
        pass
    time.sleep(rng.expovariate(1 / float(sys.argv[2])))
"""


def main() -> None:
    """Run the comparison, write its record and print its ratios."""
    options = _parse()
    sweep_options = _sweep_options(options)
    config = json.loads(sweep_options.config.read_text("utf-8"))
    prepare(parse_config(arm_config(config, SPINDLE, Tuning(), sweep_options.active)))
    record: dict[str, Any] = {
        "benchmark": "a fresh server against plain decoding",
        "settings": {**vars(options), "out": options.out.name, "config": config},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder, _busy(options):
        place = Path(folder)
        environment = _with_wrong_tables(options, place / "cache")
        servers = Servers(
            config, sweep_options.active, place, 2, dict.fromkeys(options.arms, environment)
        )
        servers.tuning = Tuning(config["drafts"][0]["name"], options.length)
        try:
            for temperature in options.temperatures:
                sweep_options.temperature = temperature
                sweep = Sweep(sweep_options, {"settings": {"config": config}}, servers)
                for in_flight in options.closed:
                    runs = []
                    for run in _point(options, sweep, servers, in_flight):
                        runs.append(run)
                        record["runs"].append({"temperature": temperature, **run})
                        records.write(options.out, record)
                    _print(options, temperature, in_flight, runs)
        finally:
            servers.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--closed", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5, help="requests a block, for each place")
    parser.add_argument("--requests", type=int, default=8, help="requests a block at the least")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--workload", default="mix")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--arms", nargs="+", default=[NONE, SPINDLE], help="the first is compared")
    parser.add_argument("--length", type=int, default=3, help="of baselines, by the first draft")
    parser.add_argument(
        "--table-error", type=float, default=0.0, help="0.25: cells up or down 25 %%"
    )
    parser.add_argument("--busy", action="store_true", help="beside a program of random bursts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _sweep_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of a sweep of the same requests."""
    command = ["--workloads", options.workload, "--out", str(options.out), "--shares"]
    command += ["--policies", "--closed", *map(str, options.closed)]
    command += ["--config", str(options.config)]
    for name in ("rounds", "max_tokens", "seed"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return parse_sweep([*command, "--requests-closed", str(options.requests)], __doc__ or "")


def _point(
    options: argparse.Namespace, sweep: Sweep, servers: Servers, in_flight: int
) -> Iterator[dict[str, Any]]:
    """Yield the runs of one point, each arm but none on a new server."""
    load = f"closed-{in_flight}"
    for arm in options.arms:
        if arm != NONE:
            servers.end(arm)
        elif servers.arm(arm)[1]:
            sweep.serve_block(options.workload, load, options.blocks, arm)
    for block in range(options.blocks):
        for arm in abba(options.arms, block):
            if servers.arm(arm)[1] and block:
                raise RuntimeError(f"the server of {arm} was ended between blocks")
            yield sweep.serve_block(options.workload, load, block, arm)


def _print(
    options: argparse.Namespace, temperature: float, in_flight: int, runs: list[dict[str, Any]]
) -> None:
    """Print a line for each arm that is compared with the first."""
    base, *others = options.arms
    against = [speed(run) for run in runs if run["policy"] == base]
    for arm in others:
        arm_runs = [run for run in runs if run["policy"] == arm]
        ratio = ratio_of_rates([speed(run) for run in arm_runs], against)
        line = (
            f"T {temperature:g}, {in_flight:2} in flight, {arm} over {base}:"
            f" {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}),"
            f" first block {speed(arm_runs[0]) / against[0]:.3f}"
        )
        counts = [run["counts"] for run in arm_runs]
        if promised := _sum(counts, "spindle_promised_tokens"):
            drafted = _sum(counts, VERIFIED)
            vain = drafted - _sum(counts, VERIFIED + '{verified="more"')
            came = _sum(counts, "spindle_planned_step_tokens") / promised
            took_s = _sum(counts, "spindle_planned_step_seconds")
            took = took_s / _sum(counts, "spindle_promised_seconds")
            line += f"; {vain:.0f} of {drafted:.0f} drafted steps in vain; measured over promised:"
            line += f" tokens {came:.3f}, seconds {took:.3f}"
        print(line, flush=True)


def _sum(counts: list[dict[str, float]], name: str) -> float:
    return math.fsum(v for run in counts for key, v in run.items() if key.startswith(name))


def _with_wrong_tables(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of servers whose latency tables are wrong by ``table_error``: a copy
    of the cache in which each cell is that much longer or shorter, at random.
    """
    if not options.table_error:
        return {}
    folder.mkdir()
    for place in cache.root().iterdir():
        if place.name == "latency":
            shutil.copytree(place, folder / place.name)
        elif place.name != "learned":
            (folder / place.name).symlink_to(place)
    rng = random.Random(options.seed)
    for path in sorted((folder / "latency").glob("*.json")):
        table = json.loads(path.read_text("utf-8"))
        if "seconds" not in table:  # a hosted engine's fit
            continue
        table["seconds"] = [
            seconds * (1 + rng.choice([-1, 1]) * options.table_error)
            for seconds in table["seconds"]
        ]
        path.write_text(json.dumps(table), "utf-8")
    return {"SPINDLE_CACHE": str(folder)}


@contextmanager
def _busy(options: argparse.Namespace) -> Iterator[None]:
    """Run a second program that computes in bursts of random length, half of the time."""
    if not options.busy:
        yield
        return
    command = [sys.executable, "-c", _BUSY, str(options.seed), str(BURST_S)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
