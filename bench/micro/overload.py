"""Twice the capacity: what admitted requests get, and how quickly the others are refused.

    python -m bench.micro.overload --minutes 5

A real tritonserver serves SmolLM2 (``--config`` names another configuration). First the capacity: a
closed loop that keeps every place of the batch taken. Then requests arrive at random (Poisson) at
twice the rate that it completed, for ``--minutes``. Writes a record; the exit status is 1 when the
inter-token time of admitted requests (median or 95th percentile) is over 1.3 of that at capacity,
when a request ended otherwise than by its final reply or UNAVAILABLE, or when none was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from backend import PROJECT_ROOT
from backend.config import load_config
from backend.model_folders import model_path
from bench import records
from bench.load import FINAL, RequestOutcome, channel, percentiles_ms, serve
from bench.prompts import PROMPTS
from bench.workloads import render
from tests.server.harness import Service

DEFAULT_CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"
REFUSED = "UNAVAILABLE"
LIMIT = 1.3
CONNECTIONS = 16


class LoadGenerator:
    """Sends requests over a few connections; ``inputs`` gives the next request's."""

    def __init__(self, port: int, texts: list[str], max_tokens: int, seed: int) -> None:
        self._port = port
        self._texts = texts
        self._max_tokens = max_tokens
        self._rng = random.Random(seed)

    async def run_closed(
        self, concurrency: int, seconds: float
    ) -> tuple[float, list[RequestOutcome]]:
        """Keep ``concurrency`` requests under way; return the completions per second and the
        requests that ended in the time.
        """
        start_s = time.perf_counter()

        async def client() -> list[RequestOutcome]:
            done = []
            async with channel(self._port) as connection:
                while time.perf_counter() < start_s + seconds:
                    done.append(await self._one(connection))
            return done

        records = [
            one
            for some in await asyncio.gather(*(client() for _ in range(concurrency)))
            for one in some
        ]
        in_time = [one for one in records if one.ended_s <= start_s + seconds]
        return len(in_time) / seconds, in_time

    async def open(self, rate: float, seconds: float) -> list[RequestOutcome]:
        """Send requests at random times, ``rate`` a second on average, whatever becomes of them."""
        connections = [channel(self._port) for _ in range(CONNECTIONS)]
        start_s, at_s, tasks = time.perf_counter(), 0.0, []
        for connection in itertools.cycle(connections):
            at_s += self._rng.expovariate(rate)
            if at_s >= seconds:
                break
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self._one(connection)))
        records = await asyncio.gather(*tasks)
        for connection in connections:
            await connection.close()
        return records

    async def _one(self, connection: grpc.aio.Channel) -> RequestOutcome:
        text = self._rng.choice(self._texts)
        return await serve(
            connection,
            "ensemble",
            {"text_input": text, "max_tokens": self._max_tokens, "return_num_output_tokens": True},
        )


def summarise(records: list[RequestOutcome]) -> dict[str, Any]:
    """Return counts by ending, and times of the requests that were served to their end."""
    ended = [one for one in records if one.outcome == FINAL]
    refused = [one.ended_s - one.sent_s for one in records if one.outcome == REFUSED]
    return {
        "requests": len(records),
        "outcomes": dict(Counter(one.outcome for one in records)),
        "messages": dict(Counter(one.message[:100] for one in records if one.message)),
        "output_tokens": sum(one.output_tokens for one in ended),
        "inter_token_ms": percentiles_ms([one.token_s for one in ended if one.token_s is not None]),
        "inter_response_ms": percentiles_ms([gap for one in ended for gap in one.gaps_s]),
        "first_text_ms": percentiles_ms(
            [one.arrivals_s[0] - one.sent_s for one in ended if one.arrivals_s]
        ),
        "refused_after_ms": percentiles_ms(refused),
    }


def check(capacity: dict[str, Any], overload: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the ratios of inter-token times, overload over capacity, and what was violated."""
    ratios = {
        name: round(overload["inter_token_ms"][name] / capacity["inter_token_ms"][name], 3)
        for name in ("p50", "p95")
    }
    violations = [
        f"inter-token time {name} is {ratio} of that at capacity"
        for name, ratio in ratios.items()
        if ratio > LIMIT
    ]
    if odd := {
        outcome: n for outcome, n in overload["outcomes"].items() if outcome not in (FINAL, REFUSED)
    }:
        violations.append(f"requests ended otherwise: {odd}")
    if REFUSED not in overload["outcomes"]:
        violations.append("no request was refused")
    return ratios, violations


async def measure(
    port: int, texts: list[str], args: argparse.Namespace
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Return the capacity in requests per second, the figures at it and those at ``--times`` of
    it.
    """
    load = LoadGenerator(port, texts, args.max_tokens, args.seed)
    await load.run_closed(args.active, args.warm_up_s)
    # one waits, so that no place is ever empty
    rate, records = await load.run_closed(args.active + 1, args.capacity_s)
    print(
        f"capacity: {rate:.2f} requests/s, "
        f"{percentiles_ms([one.token_s for one in records if one.token_s])} ms a token",
        flush=True,
    )
    return (
        rate,
        summarise(records),
        summarise(await load.open(args.times * rate, 60 * args.minutes)),
    )


def main() -> int:
    """Run the benchmark, print and write the record; return the exit status."""
    args = _arguments()
    raw = json.loads(args.config.read_text("utf-8"))
    raw["limits"] = {
        **raw.get("limits", {}),
        "max_active_requests": args.active,
        "max_queued_requests": args.queued,
    }
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "serving.json"
        config.write_text(json.dumps(raw))
        target = load_config(config).target
        messages = [message for kind in PROMPTS.values() for message in kind]
        service = Service(Path(name) / "log", config).wait_ready(limit_s=600)
        texts = (
            messages
            if not target.kind.tokenizer
            else [render(message, model_path(target)) for message in messages]
        )
        try:
            rate, capacity, overload = asyncio.run(measure(service.grpc, texts, args))
        finally:
            service.stop()
    ratios, violations = check(capacity, overload)
    record = {
        "benchmark": "overload: requests at a multiple of the rate that a full batch completes",
        "seed": args.seed,
        "minutes": args.minutes,
        "max_tokens": args.max_tokens,
        "config": raw,
        "capacity_requests_per_s": round(rate, 3),
        "offered_requests_per_s": round(args.times * rate, 3),
        "inter_token_ratio": ratios,
        "violations": violations,
        "at_capacity": capacity,
        "at_overload": overload,
    }
    records.write(args.out, record)
    print(json.dumps(record, indent=1))
    return 1 if violations else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument(
        "--times", type=float, default=2.0, help="offered load as a multiple of the capacity"
    )
    parser.add_argument("--active", type=int, default=8, help="max_active_requests")
    parser.add_argument("--queued", type=int, default=8, help="max_queued_requests")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--capacity-s", type=float, default=90)
    parser.add_argument("--warm-up-s", type=float, default=20)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=PROJECT_ROOT / "docs" / "results" / "overload.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
