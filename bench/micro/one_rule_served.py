"""Tokens a second of two checkouts of Spindle, served by real tritonservers, run by run in turn.

    python -m bench.micro.one_rule_served --before FOLDER --before-cache FOLDER \\
        --after FOLDER --after-cache FOLDER --out FILE

Both serve the shipped configuration and stay up; one at a time is under load, the other idle. In
each block, at every point (requests in flight and how tokens are drawn), both serve the same
requests, a mix of the five workloads, in ABBA order over blocks. Block 0, which warms what the
policies learn, is not scored and is run again after a start. The same command goes on where it was
stopped. The ratio is of tokens in the replies by wall time; its interval (95 %) resamples blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from backend import machine
from backend.config import load_config
from backend.model_folders import model_path
from bench import workloads
from bench.paired import abba
from bench.servers import Offer, Served, ServerArm

BEFORE, AFTER = "before", "after"
CONFIG = Path("model_repository/spindle/1/serving.json")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "sampled": {"temperature": 0.8},
}
"""How tokens are drawn: ``seeded`` requests bring a seed, ``sampled`` ones do not."""
MESSAGES = 240
ACTIVE = 16
RESAMPLES = 10_000
Run = dict[str, Any]


def requests(
    options: argparse.Namespace,
    texts: list[str],
    way: str,
    at: int,
    block: int,
    arm: str,
) -> list[dict[str, Any]]:
    """Return a run's requests, the same for both arms; no KV is reused from other runs."""
    rng = random.Random(f"{options.seed}/{way}/{at}/{block}")
    each = -(-max(options.requests, options.rounds * at) // len(workloads.NAMES))
    chosen = [text for kind in interleaved(texts) for text in rng.sample(kind, each)]
    rng.shuffle(chosen)
    asked = {
        **WAYS[way],
        "max_tokens": options.max_tokens,
        "cache_salt": f"{way}/{at}/{block}/{arm}",
    }
    seeds = [{"seed": rng.randrange(2**62)} if way == "seeded" else {} for _ in chosen]
    return [{"text_input": text, **asked, **seed} for text, seed in zip(chosen, seeds, strict=True)]


def interleaved(texts: list[str]) -> list[list[str]]:
    """Return the texts of a mix by workload."""
    return [texts[first :: len(workloads.NAMES)] for first in range(len(workloads.NAMES))]


def described(served: Served) -> dict[str, Any]:
    """Return a run's figures."""
    replies = served.replies
    names = ("output_tokens", "drafted", "accepted")
    sums = {name: sum(getattr(reply, name) for reply in replies) for name in names}
    steps = sum(n for name, n in served.counts.items() if name.startswith("spindle_steps_total"))
    return {"wall_s": round(served.wall_s, 4), "requests": len(replies), **sums, "steps": steps}


def speed(run: Run) -> float:
    """Return tokens a second."""
    return float(run["output_tokens"] / run["wall_s"])


def ratios(runs: Iterable[Run], seed: int) -> list[dict[str, Any]]:
    """Return after over before by point, by way of drawing, and over all."""
    speeds = {tuple(run[key] for key in ("way", "in_flight", "block", "arm")): run for run in runs}
    logs: dict[tuple[str, int], dict[int, float]] = {}
    for (way, at, block, arm), run in speeds.items():
        if arm == AFTER and (other := speeds.get((way, at, block, BEFORE))):
            logs.setdefault((way, at), {})[block] = math.log(speed(run) / speed(other))
    groups = {f"{way}, {at} in flight": [(way, at)] for way, at in logs}
    groups |= {way: [point for point in logs if point[0] == way] for way, _ in logs}
    groups |= {"all": list(logs)} if logs else {}
    found = []
    for name, points in groups.items():
        blocks = [b for b in logs[points[0]] if all(b in logs[point] for point in points)]
        means = [np.mean([logs[point][block] for point in points]) for block in blocks]
        if blocks:
            found.append({"of": name, **interval(means, seed)})
    return found


def interval(logs: list[Any], seed: int) -> dict[str, Any]:
    """Return the geometric mean of ratios with its interval over blocks."""
    values = np.array(logs)
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    ends = [round(float(end), 4) for end in np.exp(np.quantile(means, [0.025, 0.975]))]
    return {
        "ratio": round(float(np.exp(values.mean())), 4),
        "interval_95": ends,
        "blocks": len(values),
    }


def opened(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Return the record to go on with. Raises SystemExit for a file of other settings."""
    names = ("max_tokens", "requests", "rounds", "seed", "threads")
    settings = {name: getattr(options, name) for name in names}
    settings |= {arm: revision(getattr(options, arm)) for arm in (BEFORE, AFTER)}
    if options.out.exists():
        record: dict[str, Any] = json.loads(options.out.read_text("utf-8"))
        if record["settings"] != settings:
            raise SystemExit(f"{options.out} is of other settings: {record['settings']}")
        return record
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = [
        "python",
        "-m",
        "bench.micro.one_rule_served",
        *(word.rpartition("/")[2] for word in words),
    ]
    about = "two checkouts of Spindle, served in turn"
    return {
        "benchmark": about,
        "time_utc": began,
        "command": command,
        "machine": machine.describe(),
        "settings": settings,
        "runs": [],
    }


def revision(folder: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def serving(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Return the shipped configuration of a checkout; what is learnt is not kept over starts."""
    config: dict[str, Any] = json.loads((root / CONFIG).read_text("utf-8"))
    limits = {**config.get("limits", {}), "max_active_requests": ACTIVE}
    config |= {"limits": limits, "policy": {**config["policy"], "keep_learned": False}}
    return config | ({"threads": options.threads} if options.threads else {})


def measure(
    options: argparse.Namespace,
    record: dict[str, Any],
    servers: dict[str, ServerArm],
) -> None:
    """Run what the record lacks, saving after each run."""
    folder = model_path(load_config(options.after / CONFIG).target)
    messages = workloads.load(workloads.MIX, MESSAGES, options.seed).messages
    texts = [workloads.render(message, folder) for message in messages]
    done = {(run["block"], run["way"], run["in_flight"], run["arm"]) for run in record["runs"]}
    for block in range(options.blocks + 1):
        for way, at in product(options.ways, options.in_flight):
            for arm in abba([BEFORE, AFTER], block):
                if (block, way, at, arm) in done:
                    continue
                served = servers[arm].run(Offer(requests(options, texts, way, at, block, arm), at))
                run = {"block": block, "way": way, "in_flight": at, "arm": arm, **described(served)}
                clock = f"{datetime.now():%H:%M:%S}"
                print(clock, block, way, at, arm, f"{speed(run):.2f} tokens/s", flush=True)
                if block:
                    record["runs"].append(run)
                    write(options, record)
        for row in record.get("ratios", ()):
            print("  ", row, flush=True)


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the record with what it comes to so far, all or nothing."""
    record["ratios"] = ratios(record["runs"], options.seed)
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    part.replace(options.out)


def main() -> None:
    """Start both servers, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for arm in (BEFORE, AFTER):
        parser.add_argument(f"--{arm}", type=Path, required=True, help="a checkout")
        parser.add_argument(f"--{arm}-cache", type=Path, required=True, help="its SPINDLE_CACHE")
    parser.add_argument("--blocks", type=int, default=12, help="beside the one that warms")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--requests", type=int, default=10, help="of a run, at the least")
    parser.add_argument("--rounds", type=int, default=3, help="or as many times those in flight")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, help="of both; left out: as each measures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the same command goes on"))
    record = opened(options, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {}
        for arm in (BEFORE, AFTER):
            root, cached = (
                getattr(options, arm).resolve(),
                getattr(options, f"{arm}_cache").resolve(),
            )
            config, own = serving(options, root), Path(folder) / arm
            started = ServerArm(config, own, root, SPINDLE_CACHE=str(cached))
            servers[arm] = stack.enter_context(closing(started))
        measure(options, record, servers)


if __name__ == "__main__":
    main()
