"""Served tokens per second with the adaptive policy against the same server without speculation and without any draft loaded.

    python -m tests.bench.bench_serving --config model_repository/spindle/1/serving.json

Greedy, natural end of text. A block is as many requests at once as the concurrency says; both arms run it, in ABBA order, after a warm-up
block, and what is compared is the ratio of its emitted tokens per second. Replies that go round in circles (4-gram repetition) are
counted, and at concurrency 1, where a block is one request, left out of the headline ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from backend import machine
from backend.app import model_path
from backend.config import load_config
from tests.bench import workloads
from tests.bench.arms import PROJECT_ROOT, Arm, InProcessArm, Reply, ServerArm
from tests.bench.paired import abba, median_interval, repeated_share

ADAPTIVE, PLAIN = ARMS = ("adaptive", "plain")
LOOPING_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Block:
    """One arm's run over one block of requests."""

    arm: str
    workload: str
    concurrency: int
    number: int
    wall_s: float
    replies: list[Reply]

    @property
    def output_tokens(self) -> int:
        """Emitted tokens of all replies."""
        return sum(reply.output_tokens for reply in self.replies)

    @property
    def rate(self) -> float:
        """Emitted tokens per second."""
        return self.output_tokens / self.wall_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print a table and write the record."""
    command = sys.argv[1:] if arguments is None else list(arguments)
    args = _arguments(command)
    with tempfile.TemporaryDirectory() as folder:
        arms = _start(args, Path(folder))
        try:
            blocks = [
                block for name in args.workloads for concurrency in args.concurrency for block in _measure(args, arms, name, concurrency)
            ]
        finally:
            for arm in arms.values():
                arm.close()
    tables = [summarise(blocks, name, concurrency, args.seed) for name in args.workloads for concurrency in args.concurrency]
    _print(tables)
    _write(args, command, tables, blocks)


def summarise(blocks: list[Block], workload: str, concurrency: int, seed: int) -> dict[str, Any]:
    """Return the figures of one workload at one concurrency; ``ratio`` is adaptive / plain over paired blocks."""
    runs = {arm: [b for b in blocks if (b.arm, b.workload, b.concurrency) == (arm, workload, concurrency)] for arm in ARMS}
    pairs = list(zip(*(sorted(runs[arm], key=lambda b: b.number) for arm in ARMS), strict=True))
    headline = [pair for pair in pairs if concurrency > 1 or not any(map(_is_looping, (*pair[0].replies, *pair[1].replies)))]
    ratios = [adaptive.rate / plain.rate for adaptive, plain in headline]
    replies = {arm: [reply for block in runs[arm] for reply in block.replies] for arm in ARMS}
    drafted = sum(reply.drafted for reply in replies[ADAPTIVE])
    texts = zip(replies[ADAPTIVE], replies[PLAIN], strict=True)
    return {
        "workload": workload,
        "concurrency": concurrency,
        "blocks": len(pairs),
        "headline_blocks": len(headline),
        "ratio": median(ratios) if ratios else None,
        "ratio_interval_95": median_interval(ratios, seed) if ratios else None,
        "tokens_per_s": {arm: sum(b.output_tokens for b in runs[arm]) / sum(b.wall_s for b in runs[arm]) for arm in ARMS},
        "first_text_s": {arm: median(reply.first_s for reply in replies[arm]) for arm in ARMS},
        "acceptance": sum(reply.accepted for reply in replies[ADAPTIVE]) / drafted if drafted else None,
        "drafted_per_token": drafted / sum(reply.output_tokens for reply in replies[ADAPTIVE]),
        "looping_share": sum(map(_is_looping, replies[PLAIN])) / len(replies[PLAIN]),
        "texts_that_differ": sum(a.text != b.text for a, b in texts),
    }


def _is_looping(reply: Reply) -> bool:
    return repeated_share(reply.text) > LOOPING_SHARE


def _start(args: argparse.Namespace, folder: Path) -> dict[str, Arm]:
    """Start both arms: the configuration as it is, and the same without drafts and policy."""
    raw = json.loads(args.config.read_text("utf-8"))
    adaptive, plain = folder / "adaptive.json", folder / "plain.json"
    adaptive.write_text(json.dumps({**raw, "policy": {**raw.get("policy", {}), "keep_learned": False}}), "utf-8")  # every run begins cold
    plain.write_text(json.dumps({**raw, "drafts": [], "policy": {"kind": "none"}}), "utf-8")
    make = InProcessArm if args.in_process else ServerArm
    arms: dict[str, Arm] = {}
    for name, config in zip(ARMS, (adaptive, plain), strict=True):
        print(f"starting {name}", flush=True)
        arms[name] = make(config, folder / f"{name}.log")
    return arms


def _measure(args: argparse.Namespace, arms: dict[str, Arm], name: str, concurrency: int) -> list[Block]:
    """Run all blocks of one workload at one concurrency; block 0 warms up and is dropped."""
    texts = _texts(args, name, concurrency * (args.blocks + 1))
    blocks = []
    for number in range(args.blocks + 1):
        share = texts[number * concurrency : (number + 1) * concurrency]
        for arm in abba(ARMS, number):
            started = time.perf_counter()
            replies = arms[arm].serve(share, args.max_tokens, concurrency)
            blocks.append(Block(arm, name, concurrency, number, time.perf_counter() - started, replies))
        rates = {block.arm: f"{block.rate:.1f}" for block in blocks[-2:]}
        print(f"{name} x{concurrency} block {number}/{args.blocks}: {rates} tokens/s", flush=True)
    return [block for block in blocks if block.number > 0]


def _texts(args: argparse.Namespace, name: str, count: int) -> list[str]:
    """Return the requests of all blocks; a workload with fewer messages is gone through again."""
    messages = workloads.load(name, count, args.seed).messages
    chosen = [messages[i % len(messages)] for i in range(count)]
    folder = model_path(load_config(args.config).target)
    return chosen if args.raw else [workloads.render(message, folder) for message in chosen]


def _print(tables: list[dict[str, Any]]) -> None:
    print("\nworkload    conc  ratio  95 % interval   adaptive   plain  accepted  looping  differ")
    for row in tables:
        low, high = row["ratio_interval_95"] or (float("nan"),) * 2
        rates = row["tokens_per_s"]
        print(
            f"{row['workload']:<10} {row['concurrency']:>5} {row['ratio'] or float('nan'):>6.2f}  [{low:.2f}, {high:.2f}]"
            f" {rates[ADAPTIVE]:>12.1f} {rates[PLAIN]:>7.1f} {row['acceptance'] or 0.0:>9.2f} {row['looping_share']:>8.2f}"
            f" {row['texts_that_differ']:>7}"
        )


def _write(args: argparse.Namespace, command: list[str], tables: list[dict[str, Any]], blocks: list[Block]) -> None:
    now = datetime.now(timezone.utc)
    record = {
        "benchmark": "served tokens per second, adaptive against no speculation and no draft loaded",
        "time_utc": now.isoformat(timespec="seconds"),
        "command": ["python", "-m", "tests.bench.bench_serving", *command],
        "through": "loop in process" if args.in_process else "tritonserver, gRPC streaming",
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "prompts": "raw" if args.raw else "chat template",
        "machine": machine.describe(),
        "config": json.loads(args.config.read_text("utf-8")),
        "tables": tables,
        "blocks": [_without_texts(block) for block in blocks],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"serving-{now:%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"\nwrote {path}")


def _without_texts(block: Block) -> dict[str, Any]:
    """Return a block's figures; replies may quote a corpus that must not be copied, so they are kept as hashes."""
    replies = [
        {
            **asdict(reply),
            "text": hashlib.sha256(reply.text.encode("utf-8")).hexdigest()[:16],
            "repeated_4grams": repeated_share(reply.text),
        }
        for reply in block.replies
    ]
    return {**asdict(block), "replies": replies, "rate": block.rate}


def _arguments(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the serving configuration of the adaptive arm")
    parser.add_argument("--in-process", action="store_true", help="step the loop here, without Triton")
    parser.add_argument("--workloads", nargs="+", choices=workloads.NAMES, default=list(workloads.NAMES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--blocks", type=int, default=8, help="timed blocks per workload and concurrency")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--raw", action="store_true", help="send the bare message, without the chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PROJECT_ROOT / "docs" / "results")
    return parser.parse_args(command)


if __name__ == "__main__":
    main()
