"""The loop's time for planning by batch size, in microseconds: a part of ``search.py``, and by
itself, the least of three rounds:

    python -m bench.micro.planning --out FILE

Counted are ``View(...)`` with ``plan`` (and the Plan in it), and ``observe``, in CPU time: a busy
machine does not count, but for its caches. k_max is 8; requests unlike each other finish and arrive
in a closed loop; times are of a roofline: memory-bound at first, then by the token. Cold is the
first step of a planner that knows nothing; warm starts from the last step's price. ``2, whole
batch`` is the plan for two drafts that the target's device runs.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import records
from policy import (
    AdaptivePlanner,
    FreeChains,
    LatencyCurve,
    LatencyModel,
    Outcome,
    Plan,
    PlannerConfig,
    StepRows,
    StepTimes,
    View,
)

DRAFTS = ("lookup", "small", "medium", "large")
"""A suite with fewer takes the first ones."""
RATES = np.array([[0.3, 0.6, 0.7, 0.8], [0.8, 0.3, 0.35, 0.4], [0.1, 0.7, 0.8, 0.85]])
SHARES = (0.002, 0.03, 0.08, 0.2)
K_MAX, CONTEXT = 8, 1500
RNG = np.random.default_rng(0)  # not drawn from


def model(drafts: int) -> LatencyModel:
    """Return a made-up accelerator: 7 ms, 0.02 ms for each token after the first 64, KV on top;
    drafts at a share of it.
    """
    tokens = np.arange(4097)
    seconds = 7e-3 + 2e-5 * np.maximum(tokens - 64, 0)
    curves = [
        LatencyCurve(share * seconds, share * 2e-5, 0.0, share * 5e-8)
        for share in (1.0, *SHARES[:drafts])
    ]
    return LatencyModel(curves[0], tuple(curves[1:]), overhead_s=2e-4, speculation_s=3e-4)


class PlannedRows:
    """``rows`` requests in flight, each replaced when it ends; what a loop knows of them, as plain
    lists.
    """

    def __init__(
        self, rows: int, drafts: int, rng: np.random.Generator, remaining: int | None = None
    ) -> None:
        self._rng, self._rows, self._drafts = rng, rows, drafts
        self.ids = np.arange(rows)
        self.remaining = (
            rng.integers(20, 200, rows) if remaining is None else np.full(rows, remaining)
        )
        self.catchup = np.full((rows, drafts), 40)

    def columns(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return ids, remaining tokens, and ceilings and catch-up row by row."""
        ceiling = np.repeat(np.minimum(K_MAX, self.remaining - 1), self._drafts)
        catchup = self.catchup.ravel().tolist()
        return self.ids.tolist(), self.remaining.tolist(), ceiling.tolist(), catchup

    def step(self, view: View, plan: Plan) -> Outcome:
        """Draw what is accepted of a plan, and let requests end and arrive.

        Lookup, which is free, is scored where another draft is used.
        """
        rows, rng, length = self._rows, self._rng, plan.length
        rates = RATES[self.ids % len(RATES)]
        passed = rng.random((rows, K_MAX)) < rates[np.arange(rows), plan.draft][:, None]
        accepted = np.cumprod(passed & (np.arange(K_MAX) < length[:, None]), axis=1).sum(axis=1)
        free = plan.draft != 0
        guessed = np.cumprod(rng.random((rows, K_MAX)) < rates[:, :1], axis=1).sum(axis=1)
        over = self.remaining <= accepted + 1
        counts = length, accepted, accepted + 1, length, length, accepted
        outcome = Outcome(
            StepRows(self.ids, plan.draft, *counts),
            StepTimes(plan.predicted_s),
            FreeChains(
                self.ids[free],
                np.zeros(int(free.sum()), np.int64),
                np.minimum(guessed, accepted + 1)[free],
                np.minimum(guessed + 1, accepted + 1)[free],
            ),
            finished=self.ids[over],
            view=view,
            plan=plan,
        )
        self.remaining = np.where(over, rng.integers(20, 200, rows), self.remaining - accepted - 1)
        is_used = (plan.draft[:, None] == np.arange(self._drafts)) & (length > 0)[:, None]
        self.catchup = np.where(is_used, 1, self.catchup + accepted[:, None] + 1)
        self.catchup[over] = 40
        self.ids = np.where(over, self.ids.max() + over.cumsum(), self.ids)
        return outcome


def timed_plan(
    planner: AdaptivePlanner,
    state: Any,
    columns: tuple[list[int], ...],
    now: float,
) -> tuple[View, Plan, Any, float]:
    """Return a view of the columns, its plan, the state after that, and the microseconds."""
    ids, remaining, ceiling, catchup = columns
    context, drafts = [CONTEXT] * len(ids), len(planner.drafts)
    started = thread_time()
    view = View(
        drafts=planner.drafts,
        request=np.array(ids),
        context=np.array(context),
        remaining=np.array(remaining),
        ceiling=np.array(ceiling).reshape(-1, drafts),
        catchup=np.array(catchup).reshape(-1, drafts),
    )
    plan, state = planner.plan(view, state, now, RNG)
    return view, plan, state, 1e6 * (thread_time() - started)


def measure(
    rows: int, drafts: int, steps: int, seed: int, *, whole_batch: bool = False
) -> dict[str, float]:
    """Return medians and 95th percentiles in microseconds over a closed loop of ``rows`` requests,
    the first tenth dropped; ``whole_batch`` is the planner's.
    """
    config = PlannerConfig(whole_batch=whole_batch)
    planner = AdaptivePlanner(DRAFTS[:drafts], model(drafts), config)
    rng = np.random.default_rng(seed)
    loops = (PlannedRows(rows, drafts, rng) for _ in range(max(steps // 10, 5)))
    cold_us = [timed_plan(planner, planner.start(), loop.columns(), 0.0)[3] for loop in loops]
    loop, state = PlannedRows(rows, drafts, rng), planner.start()
    plan_us, observe_us, lengths = [], [], []
    for step in range(steps):
        view, plan, state, took_us = timed_plan(planner, state, loop.columns(), 0.01 * step)
        outcome = loop.step(view, plan)
        started = thread_time()
        state = planner.observe(outcome, state, 0.01 * step)
        observe_us.append(1e6 * (thread_time() - started))
        plan_us.append(took_us)
        lengths.append(plan.length.mean())
    warm = slice(steps // 10, None)
    figures = {
        "plan_p50_us": median(plan_us[warm]),
        "plan_p95_us": float(np.quantile(plan_us[warm], 0.95)),
        "cold_p50_us": median(cold_us),
        "observe_p50_us": median(observe_us[warm]),
        "mean_length": float(np.mean(lengths[warm])),
    }
    places = {"mean_length": 4}
    return {name: round(value, places.get(name, 1)) for name, value in figures.items()}


def flapping(rows: int, steps: int, seed: int) -> dict[str, float]:
    """Return in which share of steps a row's draft, and its draft or length, is another than in the
    step before, the batch being steady.

    No request ends, what it accepts is drawn by constant rates, and trials are left out with the
    step after them. The first half is learning. ``tokens`` is by how many its length changes in
    the mean.
    """
    drafts = len(DRAFTS)
    planner, rng = AdaptivePlanner(DRAFTS, model(drafts)), np.random.default_rng(seed)
    loop, state, plans = PlannedRows(rows, drafts, rng, 100 * steps), planner.start(), []
    for step in range(steps):
        view, plan, state, _ = timed_plan(planner, state, loop.columns(), 0.01 * step)
        state = planner.observe(loop.step(view, plan), state, 0.01 * step)
        plans.append(plan)
    late = plans[steps // 2 :]
    pairs = [pair for pair in pairwise(late) if not any("trial" in plan.notes for plan in pair)]
    other = np.array([one.draft != two.draft for one, two in pairs])
    tokens = np.array([np.abs(one.length - two.length) for one, two in pairs])
    figures = {"draft": other, "choice": other | (tokens > 0), "tokens": tokens}
    return {name: round(float(values.mean()), 4) for name, values in figures.items()}


def main() -> None:
    """Measure, and write the figures by drafts and rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for drafts, whole in ((2, False), (4, False), (2, True)):
        of_drafts = figures.setdefault(f"{drafts}, whole batch" if whole else str(drafts), {})
        for rows in (1, 4, 16, 64, 256):
            rounds = [measure(rows, drafts, 200, 0, whole_batch=whole) for _ in range(3)]
            least = {name: min(each[name] for each in rounds) for name in rounds[0]}
            of_drafts[str(rows)] = least
    records.write(options.out, figures)


if __name__ == "__main__":
    main()
