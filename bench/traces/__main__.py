"""Tokens per second of policies over traces of a real target with an EAGLE head and look-ups:

    python -m bench.traces --data FOLDER --out FILE [--in-flight 1 8 ...]

FOLDER has ``SET.jsonl[.gz]`` or ``combined_SET.jsonl[.gz]``, as data/llama3.1-8B of the public
repository SpecDecode-Bench/simulator has them. Answers are cut at 1,024 tokens. Requests are split
into halves; what has settings is tuned on the half that it is not scored on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from bench import records
from bench.traces.arms import by_path, known_arms
from bench.traces.costs import Costs
from bench.traces.figures import MIXED, TOKENS, cell, summary, table
from bench.traces.reading import TraceFileError
from bench.traces.world import LEAST_TOKENS, MOST_TOKENS, World
from policy.custom import closest
from policy.latency import LatencyError
from policy.loops.compiling import compile_all

IN_FLIGHT = 1, 8, 32, 64, 128
QUICK_ARMS = "none", "fixed-eagle", "rule", "rule-8", "planner", "planner-free"
QUICK_TOKENS = 4_000


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return value


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.traces",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--in-flight", type=_count, nargs="+", default=[*IN_FLIGHT])
    parser.add_argument("--sets", nargs="+", help=f"'{MIXED}' and sets; all if not given")
    parser.add_argument("--arms", nargs="+", help="all if not given, or yours by path")
    parser.add_argument("--costs", type=Path, help="measured tables instead of the authors' fit")
    parser.add_argument("--tokens", type=_count, default=0, help="of a run")
    parser.add_argument("--seed", type=int, default=7, help="of the split into halves")
    parser.add_argument("--cache", type=Path, help="a folder to keep what does not change in")
    parser.add_argument("--jobs", type=_count, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="few arms and tokens, mixed only")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything that was asked for. Raises TraceFileError, LatencyError or ValueError."""
    costs = Costs.measured(options.costs) if options.costs else Costs.authors()
    arms = options.arms or (QUICK_ARMS if options.quick else ())
    choices = known_arms(costs)
    for arm in arms:
        if "." in arm and arm not in choices:
            by_path(costs, arm)
        else:
            _check("arms", arm, choices)
    world = World.read(options.data, options.cache)
    sets = options.sets or ((MIXED,) if options.quick else (MIXED, *world.sets))
    tokens = options.tokens or (QUICK_TOKENS if options.quick else 0)
    for name in sets:
        _check("sets", name, (MIXED, *world.sets))
    points = list(product(sets, options.in_flight))
    compile_all()  # before the processes fork
    shared = partial(
        cell, world, costs, arms=arms, seed=options.seed, tokens=tokens, cache=options.cache
    )
    with ProcessPoolExecutor(options.jobs, initializer=_share, initargs=(shared,)) as pool:
        cells = [*pool.map(_cell, points)]
    return {
        "benchmark": "traces",
        "seed": options.seed,
        "requests": {name: int((world.of == n).sum()) for n, name in enumerate(world.sets)},
        "settings": {
            "answer_tokens": [LEAST_TOKENS, MOST_TOKENS],
            "tokens_of_a_run": tokens or {str(load): most for load, most in TOKENS.items()},
        },
        "costs": {"name": costs.name, **costs.constants},
        "summary": summary(cells),
        "cells": cells,
    }


_shared: Callable[..., dict[str, Any]] | None = None
"""The inputs that a process measures cells by."""


def _share(shared: Callable[..., dict[str, Any]]) -> None:
    global _shared  # noqa: PLW0603
    _shared = shared


def _cell(point: tuple[str, int]) -> dict[str, Any]:
    assert _shared is not None
    began_s = process_time()
    row = {**_shared(*point), "cpu_seconds": round(process_time() - began_s, 1)}
    data, in_flight = point
    print(f"{data}, {in_flight} in flight: {row['cpu_seconds']} s of CPU", file=sys.stderr)
    return row


def _check(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        like = closest(value, choices)
        raise ValueError(f"--{name} must be of {', '.join(choices)}, got {value!r}{like}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the record and its picture; returns 2 for bad input."""
    options = _options(arguments)
    try:
        record = run_all(options)
    except (TraceFileError, LatencyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(record["summary"]))
    records.write(options.out, record)
    try:
        from bench.pictures import THEMES
        from bench.traces.pictures import picture, save
    except ImportError as error:
        print(f"no picture: pip install {error.name}", file=sys.stderr)
    else:
        save(picture(record["summary"], THEMES["light"]), options.out.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
