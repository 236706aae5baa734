"""The options of the load sweep."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend import PROJECT_ROOT
from backend.engines.memory import host_bytes
from bench import workloads
from bench.peers.arms import PEERS

DEFAULT_CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"
SERVER_BYTES = 7 << 29
"""Memory of a server of SmolLM2 with its drafts."""
VARIATION = {"poisson": 1.0, "bursty": 3.0}
"""Coefficient of variation of the gaps between arrivals."""
QUICK: dict[str, Any] = {
    "workloads": ["mix"],
    "closed": [1, 8],
    "shares": [0.7],
    "arrivals": ["poisson"],
    "lengths": [3],
    "blocks": 2,
    "requests": 12,
    "requests_closed": 4,
    "rounds": 2,
    "max_tokens": 24,
    "active": 8,
    "limit_s": 480.0,
}


def parse(command: Sequence[str], description: str) -> argparse.Namespace:
    """Read the command line, which ``description`` is the help of; ``--quick`` changes defaults."""
    parser = argparse.ArgumentParser(
        prog="spindle bench",
        description=description,
        epilog="example: spindle bench --quick --out build/quick.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure a few points in small blocks, at most eight minutes",
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument(
        "--in-process", action="store_true", help="run the loop in this process, without Triton"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=[*workloads.NAMES, workloads.MIX],
        default=["chat", "summarise", "qa", "sql", "mix"],
    )
    parser.add_argument(
        "--policies",
        nargs="*",
        help="policies in addition to none and spindle; a dotted path names your own (default: "
        "all except your own and the ablations)",
    )
    parser.add_argument(
        "--ablations",
        action="store_true",
        help="also run spindle without each part and draft, or with a part that is off by default",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        choices=[*PEERS, "all"],
        help="other stacks to run, only in closed loops",
    )
    parser.add_argument(
        "--closed", nargs="+", type=int, default=[1, 2, 4, 8, 16, 24], help="requests in flight"
    )
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=[0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5],
        help="arrival rates as shares of the capacity",
    )
    parser.add_argument("--arrivals", nargs="*", choices=list(VARIATION), default=list(VARIATION))
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[1, 2, 3, 4, 6, 8],
        help="lengths for the fixed choices",
    )
    parser.add_argument(
        "--blocks", type=int, default=8, help="number of warm blocks, after one cold block"
    )
    parser.add_argument(
        "--requests", type=int, default=40, help="requests per block in an open loop"
    )
    parser.add_argument(
        "--requests-closed",
        type=int,
        default=8,
        help="minimum of requests per block in a closed loop",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="or this many requests for each place, so that the end with a half-empty batch "
        "matters less",
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0, requests have seeds, so that every policy writes the same text",
    )
    parser.add_argument(
        "--prefix",
        choices=["cold", "warm"],
        default="cold",
        help="warm: serve the prompts for one token each before a run",
    )
    parser.add_argument(
        "--raw", action="store_true", help="send the message without the chat template"
    )
    parser.add_argument(
        "--active",
        type=int,
        default=16,
        help="places in the in-flight batch; this many in flight saturate it",
    )
    parser.add_argument("--seed", type=int, default=0)
    room = max(2, min(8, host_bytes() // SERVER_BYTES))
    parser.add_argument(
        "--servers",
        type=int,
        default=room,
        help="servers (in process: engines) to keep running; the least recently used ends first",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        help="start no run of a warm block after this many seconds; the same command continues "
        "later",
    )
    parser.add_argument("--out", type=Path, default=PROJECT_ROOT / "build" / "sweep.json")
    if "--quick" in command:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(command)
    options.peers = list(PEERS) if "all" in options.peers else options.peers
    if options.peers and options.shares:
        parser.error("--peers serve closed loops only: give --shares without a number")
    if options.peers and options.prefix == "warm":
        parser.error("--peers keep no prefixes: --prefix must be cold")
    if options.ablations and options.policies is None:
        options.policies = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options
