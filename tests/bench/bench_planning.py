"""Planning time by batch size: ``python -m tests.bench.bench_planning [--seed 0] [--steps 200]`` prints medians as one JSON object.

Three drafts, k_max 8, acceptance unlike between requests, requests finishing and arriving: what the loop pays for ``plan`` and ``observe``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from policy import AdaptivePlanner, LatencyModel, LatencyTable, Outcome, View

DRAFTS = ("small", "large", "lookup")
RATES = np.array([[0.6, 0.8, 0.3], [0.3, 0.4, 0.8], [0.8, 0.85, 0.1]])
K_MAX = 8


def model() -> LatencyModel:
    """Return a made-up CPU: flat to 8 tokens, then 0.3 ms a token; drafts at 6 %, 20 % and nearly nothing."""
    grid = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    seconds = {t: 0.010 + 0.0003 * max(0, t - 8) for t in grid}
    tables = {name: {t: share * s for t, s in seconds.items()} for name, share in zip(DRAFTS, (0.06, 0.2, 0.002), strict=True)}
    return LatencyModel.from_tables(
        LatencyTable.synthetic("target", seconds), {name: LatencyTable.synthetic(name, t) for name, t in tables.items()}, overhead_s=2e-4
    )


def measure(rows: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    """Return medians and 95th percentiles (milliseconds) over steps of a closed loop of ``rows`` requests, the first tenth dropped."""
    planner = AdaptivePlanner(DRAFTS, model())
    state, times = planner.start(), []
    ids, remaining, catchup = np.arange(rows), rng.integers(20, 200, rows), np.full((rows, len(DRAFTS)), 40)
    for step in range(steps):
        ceiling = np.repeat(np.minimum(K_MAX, remaining - 1)[:, None], len(DRAFTS), axis=1)
        view = View(
            DRAFTS, ids, np.full(rows, 300), remaining, ceiling, catchup, np.ones(rows), np.zeros(rows, np.int64), np.ones(rows, np.bool_)
        )
        started = perf_counter()
        plan, state = planner.plan(view, state, float(step), rng)
        planned = perf_counter()
        rate = RATES[ids % 3, plan.draft]
        held = (rng.random((rows, K_MAX)) < rate[:, None]) & (np.arange(K_MAX) < plan.length[:, None])
        accepted = np.cumprod(held, axis=1).sum(axis=1)
        over = remaining <= accepted + 1
        outcome = Outcome(
            *(ids, plan.draft, plan.length, accepted, accepted + 1, plan.length, view.rule),
            measured_s=plan.predicted_s,
            finished=ids[over],
        )
        resumed = perf_counter()
        state = planner.observe(outcome, state, float(step))
        times.append((planned - started, perf_counter() - resumed))
        remaining = np.where(over, rng.integers(20, 200, rows), remaining - accepted - 1)
        catchup = np.where(plan.draft[:, None] == np.arange(len(DRAFTS)), 1, catchup + accepted[:, None] + 1)
        catchup[over] = 40
        ids = np.where(over, ids.max() + over.cumsum(), ids)
    plan_ms, observe_ms = 1e3 * np.array(times[steps // 10 :]).T
    figures = {"plan_ms_median": np.median(plan_ms), "plan_ms_p95": np.quantile(plan_ms, 0.95), "observe_ms_median": np.median(observe_ms)}
    return {name: round(float(value), 3) for name, value in figures.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    command = f"python -m tests.bench.bench_planning --seed {options.seed} --steps {options.steps}"
    rng = np.random.default_rng(options.seed)
    batches = {str(rows): measure(rows, options.steps, rng) for rows in (1, 8, 64)}
    print(json.dumps({"command": command, "seed": options.seed, "numpy": np.__version__, "batches": batches}, indent=2))


if __name__ == "__main__":
    main()
