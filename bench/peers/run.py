"""Spindle against other stacks: same weights, prompts and machine, interleaved, one thread each.

    bench/peers/peers.sh vllm openvino llamacpp                    # their environments, once
    python -m bench.peers.run --out docs/results/peers-avx2.json   # ten minutes at most

``--families``, ``--peers`` and ``--blocks`` make it less or more.

Spindle (with and without speculation, each on a tritonserver), transformers, vLLM (its server),
OpenVINO GenAI and llama.cpp (node-llama-cpp); each peer plain, with the largest of Spindle's drafts
and with prompt lookup, proposing 4 tokens a step. In each block every arm serves the same requests,
greedily, at each number in flight, in ABBA order; what counts are ratios of tokens per second
within a block (medians over blocks). Before the first block all serve other prompts once.
Exactness: the share of texts that are those of the same stack's plain arm, and of Spindle without
speculation, and where the others part. A peer without its environment, or that does not start, is
skipped with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from backend import PROJECT_ROOT
from backend.config import parse_config
from backend.machine import machine
from backend.model_folders import model_path
from backend.tokenizer import Tokenizer, load_tokenizer
from bench import records, workloads
from bench.in_process import first_difference
from bench.peers.arms import ALONE, PEERS, Peers
from bench.servers import OfferedLoad, ServedReply
from bench.sweep.arms import AGAIN, NONE, SPINDLE, Servers, Tuning, arm_config
from engines_build.prepare import prepare
from policy.simulation.statistics import abba, median_interval

IN_FLIGHT = (1, 8)
ACTIVE = max(IN_FLIGHT)
MESSAGES = 240
MAX_PROMPT_CHARACTERS = 1500
"""Longer messages would spend the time on prompts and not on what is compared."""
CONFIGS = {
    "tiny": Path(__file__).parent.parent / "tiny.json",
    "smollm2": PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json",
}
"""The quick one first: what it does not use of its half of the time the other has."""
Run = dict[str, Any]


class ModelFamily:
    """One target with its drafts, and all that serves it."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        config = json.loads(CONFIGS[name].read_text("utf-8"))
        target = {**config["target"], "dtype": options.dtype}
        self._config = {**config, "target": target, "threads": 1}
        prepare(parse_config(arm_config(self._config, SPINDLE, Tuning(), ACTIVE)))
        self._servers, self._peers = (
            Servers(self._config, ACTIVE, folder, most=2),
            Peers(self._config),
        )
        self.skipped = {
            name: reason for name in options.peers if (reason := self._peers.missing(name))
        }
        self._names = [
            NONE,
            SPINDLE,
            *(name for name in options.peers if name not in self.skipped),
            AGAIN,
        ]
        source = model_path(parse_config(self._config).target)
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self._texts = {workload: self._render(workload, source) for workload in options.workloads}
        self.runs: list[Run] = []

    @property
    def names(self) -> list[str]:
        """The arms that serve."""
        return [name for name in self._names if name not in self.skipped]

    def weights(self) -> dict[str, str]:
        """Say what each arm reads."""
        config = parse_config(self._config)
        target, drafts = "bf16 checkpoint", ", ".join(draft.name for draft in config.drafts)
        target += f", run in {config.target.dtype}" if config.target.dtype != "bf16" else ""
        dtypes = {NONE: target, SPINDLE: f"{target}; drafts {drafts}"}
        return dtypes | {name: self._peers.weights(name) for name in self.names if name in PEERS}

    def start(self) -> None:
        """Start all, as many at once as there are cores, and let them serve a few prompts that are
        not scored.
        """
        with ThreadPoolExecutor(machine.cores()) as starting:
            servers = {
                name: starting.submit(self._peers.arm, name) for name in self.names if name in PEERS
            }
            for name in (NONE, SPINDLE):
                self._servers.arm(name)
        for name, start in servers.items():
            if error := start.exception():
                self.skipped[name] = str(error).splitlines()[0]
        for workload in self._texts:
            for name in self.names:
                self._serve(workload, -1, 1 if name in ALONE else ACTIVE, name)

    def block(self, number: int) -> None:
        """Let every arm serve the same requests, alone and together."""
        for workload in self._texts:
            for place, in_flight in enumerate(IN_FLIGHT):
                for name in abba(
                    [name for name in self.names if in_flight == 1 or name not in ALONE],
                    number + place,
                ):
                    if run := self._serve(workload, number, in_flight, name):
                        self.runs.append(
                            {
                                "workload": workload,
                                "in_flight": in_flight,
                                "block": number,
                                "arm": name,
                                **run,
                            }
                        )

    def close(self) -> None:
        """End all."""
        self._peers.close()
        self._servers.close()

    def _serve(self, workload: str, block: int, in_flight: int, name: str) -> Run | None:
        offer = self._offer(workload, block, in_flight, name)
        try:
            arm, fresh = (self._peers if name in PEERS else self._servers).arm(name)
            # it had to make room for another: what it serves first is not scored now either
            if fresh and block >= 0:
                arm.run(self._offer(workload, -1, in_flight, name))
            result = arm.run(offer)
        except (RuntimeError, BrokenPipeError) as error:
            if name not in PEERS:
                raise
            self.skipped[name] = str(error).splitlines()[0]
            return None
        return {"wall_s": result.wall_s, "replies": result.replies}

    def _offer(self, workload: str, block: int, in_flight: int, name: str) -> OfferedLoad:
        rng = random.Random(f"{self._options.seed}/{workload}/{block}/{in_flight}")
        texts = rng.sample(self._texts[workload], max(self._options.requests, in_flight))
        salt = f"{workload}/{block}/{in_flight}/{name}"
        requests = [
            {"text_input": text, "max_tokens": self._options.max_tokens, "cache_salt": salt}
            for text in texts
        ]
        return OfferedLoad(requests, in_flight)

    def _render(self, workload: str, folder: Path) -> list[str]:
        messages = workloads.load(workload, MESSAGES, self._options.seed).messages
        return [
            workloads.render(message, folder)
            for message in messages
            if len(message) < MAX_PROMPT_CHARACTERS
        ]


def rows(family: ModelFamily, seed: int) -> list[dict[str, Any]]:
    """Return a row an arm and number in flight, of the arms that have run in every block."""
    measured = {
        (run["workload"], run["in_flight"], run["block"], run["arm"]): run for run in family.runs
    }
    points = sorted({key[:3] for key in measured})
    table = []
    for workload, in_flight in dict.fromkeys(point[:2] for point in points):
        blocks = [point for point in points if point[:2] == (workload, in_flight)]
        for name in (
            name for name in family.names if all((*block, name) in measured for block in blocks)
        ):
            runs, none, plain, spindle = (
                [measured[(*block, arm)] for block in blocks]
                for arm in (name, NONE, plain_of(name), SPINDLE)
            )
            replies = [reply for run in runs for reply in run["replies"]]
            table.append(
                {
                    "workload": workload,
                    "in_flight": in_flight,
                    "arm": name,
                    "tokens_per_s": round(median(map(speed, runs)), 2),
                    "mean_latency_s": round(
                        sum(reply.total_s for reply in replies) / len(replies), 4
                    ),
                    "first_token_p50_s": round(median(reply.first_s for reply in replies), 4),
                    "over_plain": ratio(runs, plain, seed),
                    "over_none": ratio(runs, none, seed),
                    "spindle_over": ratio(spindle, runs, seed),
                    "as_plain": exactness(runs, plain, family.tokenizer),
                    "as_none": exactness(runs, none, family.tokenizer),
                }
            )
    return table


def plain_of(name: str) -> str:
    """Return the arm of the same stack that does not speculate."""
    return f"{name.partition('-')[0]}-plain" if name in PEERS else NONE


def speed(run: Run) -> float:
    """Return emitted tokens per second."""
    return float(sum(reply.output_tokens for reply in run["replies"]) / run["wall_s"])


def ratio(ours: list[Run], theirs: list[Run], seed: int) -> dict[str, Any]:
    """Return the median over blocks of the ratio of speeds, with its interval where there are
    blocks enough.
    """
    ratios = [speed(one) / speed(other) for one, other in zip(ours, theirs, strict=True)]
    ends = [round(end, 3) for end in median_interval(ratios, seed)] if len(ratios) > 1 else None
    return {"median": round(median(ratios), 3), "interval_95": ends, "blocks": len(ratios)}


def exactness(ours: list[Run], theirs: list[Run], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return how many texts are the same, and the first token that differs of each that is not (as
    this tokenizer cuts both texts).
    """
    pairs: list[tuple[ServedReply, ServedReply]] = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for pair in zip(one["replies"], other["replies"], strict=True)
    ]
    parted = [(a.text, b.text) for a, b in pairs if a.text != b.text]
    first = (first_difference(tokenizer.encode(a), tokenizer.encode(b)) for a, b in parted)
    shorter = (min(len(tokenizer.encode(text)) for text in pair) for pair in parted)
    places = sorted(end if at is None else at for at, end in zip(first, shorter, strict=True))
    return {
        "texts": len(pairs),
        "same": len(pairs) - len(parted),
        "first_difference_tokens": places,
    }


def measure(name: str, options: argparse.Namespace, limit_s: float, folder: Path) -> dict[str, Any]:
    """Measure a family; no block is begun after so long."""
    begun_s = time.monotonic()
    family = ModelFamily(name, options, folder)
    load = [os.getloadavg()[0]]
    try:
        family.start()
        started_s = time.monotonic()
        for block in range(options.blocks):
            spent_s = time.monotonic() - begun_s
            each_s = (time.monotonic() - started_s) / max(1, block)
            if block and spent_s + each_s > limit_s:
                break
            family.block(block)
            print(
                f"{name}: block {block + 1} of {options.blocks}, "
                f"{time.monotonic() - begun_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    finally:
        family.close()
    load.append(os.getloadavg()[0])
    return {
        "family": name,
        "weights": family.weights(),
        "skipped": family.skipped,
        "load_average": [round(value, 2) for value in load],
        "took_s": round(time.monotonic() - begun_s, 1),
        "rows": rows(family, options.seed),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the families and write their record."""
    command = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(command)
    record: dict[str, Any] = {
        "benchmark": "peers: other stacks on the same weights and prompts, closed loop, greedy, "
        "one "
        "thread each",
        "settings": {
            key: getattr(options, key)
            for key in ("seed", "blocks", "requests", "max_tokens", "workloads", "dtype")
        },
        "families": [],
    }
    for number, name in enumerate(options.families):
        limit_s = (options.deadline_s - time.monotonic()) / (len(options.families) - number)
        with tempfile.TemporaryDirectory() as folder:
            record["families"].append(measure(name, options, limit_s, Path(folder)))
        records.write(options.out, record)
    print(f"wrote {options.out}")


def parse(command: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument(
        "--workloads", nargs="+", choices=[*workloads.NAMES, workloads.MIX], default=[workloads.MIX]
    )
    parser.add_argument("--dtype", default="auto", help="of Spindle's target")
    parser.add_argument(
        "--blocks",
        type=int,
        default=6,
        help="at the most: none is begun that would end after the limit",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=2,
        help="of a block, at the least; one for each in flight else",
    )
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=570.0,
        help="for everything, the start of the stacks included",
    )
    parser.add_argument("--out", type=Path, default=PROJECT_ROOT / "build" / "peers.json")
    options = parser.parse_args(command)
    for name in {plain_of(name) for name in options.peers} - {*options.peers}:
        parser.error(f"--peers: without {name} there is nothing to hold the others against")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.deadline_s = time.monotonic() + options.limit_s
    return options


if __name__ == "__main__":
    # what it has started ends with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
