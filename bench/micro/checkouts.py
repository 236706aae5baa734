"""Tokens a second of checkouts and configurations of Spindle, served by real tritonservers, run by
run in turn.

    python -m bench.micro.checkouts --out FILE --over before --texts FOLDER \\
        --arm before=CHECKOUT=CONFIG --arm after=.=CONFIG ...

CONFIG is a ``serving.json``. All servers stay up; one at a time is under load, the others idle. In
each block, at every point (requests in flight and temperature), all serve the same requests, a mix
of the five workloads, forwards in one block and backwards in the next. Block 0, which warms what
the policies learn, is not scored and is run again after a start. Every run has a ``cache_salt`` of
its own: a prompt that comes again finds neither its KV nor its answer. A run has several rounds of
requests, for at its end, where some are over sooner, the batch is half empty. The same command
goes on where it was stopped. Ratios are of tokens in the replies by
wall time, and of the mean time between tokens (the other over the arm: more is faster); their
intervals (95 %) resample blocks.
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
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from backend.tokenizer import load_tokenizer
from bench import records, servers, workloads
from bench.servers import LoadResult, OfferedLoad, ServerArm
from policy.simulation.statistics import abba

MESSAGES = 1200
RESAMPLES = 10_000
Run = dict[str, Any]


@dataclass(frozen=True)
class Checkout:
    """An arm: a checkout that serves a configuration."""

    name: str
    root: Path
    config: Path

    @classmethod
    def read(cls, word: str) -> Checkout:
        """Read NAME=CHECKOUT=CONFIG."""
        name, root, config = word.split("=")
        return cls(name, Path(root).resolve(), Path(config).resolve())

    def settings(self, threads: int) -> dict[str, Any]:
        """Return what it serves; what is learnt is not kept over starts."""
        config: dict[str, Any] = json.loads(self.config.read_text("utf-8"))
        policy = {**config["policy"], "keep_learned": False}
        return {**config, "threads": threads, "policy": policy}

    def revision(self) -> str:
        """Return the commit."""
        command = ["git", "-C", str(self.root), "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class MessagePool:
    """Hands out the rendered messages of a mix that have a length in ``tokens``, each once."""

    def __init__(self, folder: Path, tokens: tuple[int, int], seed: int) -> None:
        tokenizer = load_tokenizer(folder)
        self.tokens: list[int] = []
        self._by_kind: list[list[str]] = []
        for name in workloads.NAMES:
            texts = []
            for message in workloads.load(name, MESSAGES // len(workloads.NAMES), seed).messages:
                text = workloads.render(message, folder)
                if tokens[0] <= len(ids := tokenizer.encode(text)) <= tokens[1]:
                    texts.append(text)
                    self.tokens.append(len(ids))
            random.Random(f"{seed}/{name}").shuffle(texts)
            self._by_kind.append(texts)
        self._next = [0] * len(self._by_kind)

    def take(self, count: int) -> list[str]:
        """Return ``count`` messages of all kinds in turn; a kind that is used up starts again."""
        batch = []
        for number in range(count):
            kind = number % len(self._by_kind)
            texts, at = self._by_kind[kind], self._next[kind]
            batch.append(texts[at % len(texts)])
            self._next[kind] += 1
        return batch


def describe(result: LoadResult) -> dict[str, Any]:
    """Return a run's figures."""
    replies = result.replies
    sums = {
        name: sum(getattr(reply, name) for reply in replies)
        for name in ("input_tokens", "output_tokens", "drafted", "accepted")
    }
    steps = sum(n for name, n in result.counts.items() if name.startswith("spindle_steps_total"))
    between = [
        (reply.total_s - reply.first_s) / (reply.output_tokens - 1)
        for reply in replies
        if reply.output_tokens > 1
    ]
    return {
        "wall_s": round(result.wall_s, 4),
        "between_tokens_s": round(float(np.mean(between)), 6),
        "requests": len(replies),
        **sums,
        "steps": steps,
    }


def speeds(run: Run) -> tuple[float, float]:
    """Return tokens a second of the run, and of one request while it is written."""
    return run["output_tokens"] / run["wall_s"], 1 / run["between_tokens_s"]


def ratios(runs: list[Run], over: list[str], seed: int) -> list[dict[str, Any]]:
    """Return every arm over each of ``over``, by point."""
    by_key = {
        tuple(run[k] for k in ("temperature", "in_flight", "arm", "block")): run for run in runs
    }
    points = sorted({key[:2] for key in by_key})
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    rows = []
    for other, point, arm in product(over, points, arms):
        logs = [
            [math.log(a / b) for a, b in zip(speeds(run), speeds(base), strict=True)]
            for (t, at, name, block), run in by_key.items()
            if (t, at) == point and name == arm and (base := by_key.get((*point, other, block)))
        ]
        if arm != other and logs:
            rates, between = (interval(list(column), seed) for column in zip(*logs, strict=True))
            rows.append(
                {
                    "arm": arm,
                    "over": other,
                    "temperature": point[0],
                    "in_flight": point[1],
                    "blocks": len(logs),
                    "tokens_per_s": rates,
                    "between_tokens": between,
                }
            )
    return rows


def interval(logs: list[float], seed: int) -> list[float]:
    """Return the geometric mean of ratios and the ends of its interval over blocks."""
    values = np.array(logs)
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    ends = np.quantile(means, [0.025, 0.975])
    return [round(float(value), 3) for value in np.exp([values.mean(), *ends])]


def open_record(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record to go on with. Raises SystemExit for a file of other settings."""
    names = ("max_tokens", "prompt_tokens", "requests", "rounds", "seed", "threads")
    settings = {name: getattr(options, name) for name in names}
    settings["arms"] = {
        arm.name: {
            "commit": arm.revision(),
            "config": _without_paths(arm.settings(options.threads)),
        }
        for arm in options.arm
    }
    if options.out.exists():
        record: dict[str, Any] = json.loads(options.out.read_text("utf-8"))
        if record["settings"] != settings:
            raise SystemExit(f"{options.out} is of other settings: {record['settings']}")
        return record
    return {
        "benchmark": "checkouts and configurations of Spindle, served in turn",
        "settings": settings,
        "runs": [],
    }


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names of its folders instead of where they are here."""

    def without_path(engine: dict[str, Any]) -> dict[str, Any]:
        model = engine.get("model", "")
        return {**engine, "model": Path(model).name} if Path(model).is_absolute() else engine

    return {
        **config,
        "target": without_path(config["target"]),
        "drafts": [*map(without_path, config["drafts"])],
    }


def measure(
    options: argparse.Namespace, record: dict[str, Any], arms: dict[str, ServerArm]
) -> None:
    """Run what the record lacks, saving after each run."""
    prompts = MessagePool(options.texts, tuple(options.prompt_tokens), options.seed)
    record["prompt_tokens_mean"] = round(float(np.mean(prompts.tokens)), 1)
    done = {
        (run["block"], run["temperature"], run["in_flight"], run["arm"]) for run in record["runs"]
    }
    for block in range(options.blocks + 1):
        for temperature, at in product(options.temperature, options.in_flight):
            texts = prompts.take(max(options.requests, options.rounds * at))
            for name in abba(list(arms), block):
                if (block, temperature, at, name) in done:
                    continue
                sampling = {"temperature": temperature} if temperature else {}
                salt = f"{block}/{temperature}/{at}"
                inputs = {"max_tokens": options.max_tokens, "cache_salt": salt, **sampling}
                requests = [
                    {"text_input": text, **inputs, **({"seed": number} if sampling else {})}
                    for number, text in enumerate(texts)
                ]
                run = describe(arms[name].run(OfferedLoad(requests, at)))
                print(f"{block} T {temperature}, {at}: {name}", *speeds(run), flush=True)
                if block:
                    where = {"block": block, "temperature": temperature, "in_flight": at}
                    record["runs"].append({**where, "arm": name, **run})
                    write(options, record)
    for row in record.get("ratios", ()):
        print(row, flush=True)


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the record with its ratios so far, all or nothing."""
    record["ratios"] = ratios(record["runs"], options.over, options.seed)
    records.write(options.out, record)


def main() -> None:
    """Start all servers, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arm", type=Checkout.read, action="append", required=True)
    parser.add_argument(
        "--over", nargs="+", required=True, help="arms that the others are compared with"
    )
    parser.add_argument(
        "--texts", type=Path, required=True, help="folder of tokenizer and template"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[100, 300])
    parser.add_argument("--blocks", type=int, default=6, help="blocks after the one that warms up")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--requests", type=int, default=5, help="of a run, at the least")
    parser.add_argument("--rounds", type=int, default=5, help="or as many times those in flight")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1, help="of every server's engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the same command goes on"))
    servers.FLAGS.pop("remember")  # an older checkout does not know it; runs have salts
    record = open_record(options)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = {}
        for arm in options.arm:
            started = ServerArm(arm.settings(options.threads), Path(folder) / arm.name, arm.root)
            arms[arm.name] = stack.enter_context(closing(started))
        measure(options, record, arms)


if __name__ == "__main__":
    main()
