"""The policy's time in a step of a host, by rows: planning, drafting, learning and all else
between the host's two calls. No vLLM: the target is a pause of ``--step-s``.

    python -m bench.hosts.overhead --out docs/results/host-overhead.json     # a minute

A third of each row's text repeats what came before; a request ends after 128 tokens and another
arrives. Times are of steps after the first ``WARM_STEPS``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from backend.hosts.adapter import Host, HostRow, VerifiedRow
from backend.hosts.settings import TARGET, host_config
from backend.ops.stats import Stats
from bench import records
from policy import LatencyTable

ROWS = (1, 8, 16, 32, 64)
WARM_STEPS, STEPS = 60, 300
K_MAX, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 128, 128


class ScriptedRequest:
    """A request: what it will write is known to the bench alone."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        self.number, self.length = number, PROMPT_TOKENS
        tokens = rng.integers(0, 30_000, PROMPT_TOKENS + OUTPUT_TOKENS).tolist()
        for start in range(PROMPT_TOKENS, len(tokens), 24):  # a third is from the prompt
            source = int(rng.integers(0, PROMPT_TOKENS - 8))
            tokens[start : start + 8] = tokens[source : source + 8]
        self.tokens: list[int] = tokens

    def step(self, proposed: list[int]) -> VerifiedRow:
        """Follow a proposal as far as the text matches it, and write one more token."""
        rest, accepted = self.tokens[self.length :], 0
        while accepted < min(len(proposed), len(rest) - 1) and proposed[accepted] == rest[accepted]:
            accepted += 1
        self.length += accepted + 1
        return VerifiedRow(self.number, proposed, self.tokens[: self.length])


def measure(rows: int, step_s: float, drafts: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return milliseconds of steps with this many rows."""
    rng, numbers = np.random.default_rng(seed), iter(range(10**9))
    stats = Stats()
    host = Host(host_config({"drafts": drafts}, K_MAX, 4096), stats)
    host.plan_by(LatencyTable.synthetic(TARGET, {1: step_s, 64: 1.05 * step_s, 576: 2 * step_s}))
    running = [ScriptedRequest(next(numbers), rng) for _ in range(rows)]
    taken_s: list[float] = []
    for step in range(WARM_STEPS + STEPS):
        if step == WARM_STEPS:
            stats.drain()
        host_rows = [
            HostRow(t.number, t.tokens[: t.length], PROMPT_TOKENS, len(t.tokens) - t.length)
            for t in running
        ]
        started_s = perf_counter()
        proposals = host.propose(host_rows)
        proposed_s = perf_counter() - started_s
        done = [t.step(p.tokens if (p := proposals.get(t.number)) else []) for t in running]
        sleep(step_s)
        over = [t for t in running if t.length >= len(t.tokens)]
        started_s = perf_counter()
        host.ran(done, verify_s=step_s)
        host.end([t.number for t in over])
        if step >= WARM_STEPS:
            taken_s.append(proposed_s + perf_counter() - started_s)
        running = [t for t in running if t not in over] + [
            ScriptedRequest(next(numbers), rng) for _ in over
        ]
    parts: defaultdict[str, float] = defaultdict(float)
    for name, labels, amount in stats.drain().counters:
        if name == "spindle_step_part_seconds_total":
            parts[labels["part"]] += 1e3 * amount / STEPS
    taken_ms = 1e3 * np.array(taken_s)
    figures = {"mean": taken_ms.mean(), "median": np.median(taken_ms)}
    figures["p95"] = np.quantile(taken_ms, 0.95)
    return {
        "rows": rows,
        **{name: round(float(value), 3) for name, value in figures.items()},
        "parts": {k: round(v, 3) for k, v in parts.items() if k not in ("verify", "rest")},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft", choices=("lookup", "suffix"), default="suffix")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drafts = [{"engine": options.draft, "name": options.draft}]
    results = []
    for rows in ROWS:
        results.append(measure(rows, options.step_s, drafts, options.seed))
        print(json.dumps(results[-1]))
    if options.out:
        record = {
            "step_s": options.step_s,
            "seed": options.seed,
            "unit": "milliseconds a step",
            "found": results,
        }
        records.write(options.out, record)


if __name__ == "__main__":
    main()
