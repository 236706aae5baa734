"""The adaptive planner on the H200's record in virtual time:

    python -m bench.simulator.h200 --out FILE [--loads 1 8 32 64 128] [--seeds 0 1 2]

A script of requests, the same for all policies, is served by every fixed length, by the planner
with the exact times and with the tables of the record, and by an oracle that knows how likely every
node is. In ``mixed``, the script of the record, half of the requests are easy; in ``hours`` easy
and hard ones come in turns, a few batches long each. A policy starts fresh, and what it serves of
the first requests does not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from bench import records
from bench.simulator.device_step import K_MAX, DeviceRecord, DeviceRun, DeviceStep, OracleRun
from policy.baselines import FixedLength, NoSpeculation
from policy.guard import Guard
from policy.latency import LatencyModel
from policy.plan import AnyPolicy, FloatArray
from policy.planner import AdaptivePlanner, PlannerConfig
from policy.simulation.statistics import ratio_of_rates

LOADS = (1, 8, 32, 64, 128)
HOUR_BATCHES = 4
EASY_AND_HARD = np.array([[0.97, 0.45], [0.95, 0.2]])
"""By head, how often its first node is right in requests of an easy and of a hard hour."""
FIXED = {"large": range(1, 7), "small": (2, 4)}
ADAPTIVE = "exact", "recorded"


@dataclass(frozen=True)
class Script:
    """Requests, and how many of them count."""

    name: str
    rates: FloatArray | None
    """[D, 2] as ``DeviceRecord.rates``; None: the record's."""
    counted: Callable[[int], int]
    """Requests that count, by rows."""

    def kind_of(self, rows: int) -> Callable[[int, np.random.Generator], int]:
        """Return what draws the class of a request by its number."""
        if self.name == "mixed":
            return lambda _, rng: int(rng.random() < 0.5)
        return lambda number, _: (number - 1) // (HOUR_BATCHES * rows) % 2


def learning(rows: int) -> int:
    """Return the requests that end before others count: 1 to 2 s of them, as on the GPU."""
    return 4 + rows


SCRIPTS = {
    "mixed": Script("mixed", None, lambda rows: 40 + 4 * rows),
    "hours": Script("hours", EASY_AND_HARD, lambda rows: 4 * HOUR_BATCHES * rows),
}


def planner(recorded: DeviceRecord, model: LatencyModel) -> AnyPolicy:
    """Return the planner under its guard."""
    config = PlannerConfig(k_max=K_MAX, whole_batch=True)
    return Guard(AdaptivePlanner(recorded.drafts, model, config))


def run(recorded: DeviceRecord, script: Script, arm: str, rows: int, seed: int) -> dict[str, Any]:
    """Return the speed of an arm in tokens a second, and the means of its steps."""
    kind = DeviceRun
    policy: AnyPolicy = NoSpeculation()
    if arm == "oracle":
        kind = OracleRun
    elif arm in ADAPTIVE:
        model = recorded.exact(rows) if arm == "exact" else recorded.fit_latency()
        policy = planner(recorded, model)
    elif arm != "none":
        draft, length = arm.split()
        policy = FixedLength(draft, int(length))
    one = kind(recorded, policy, rows, script.kind_of(rows), seed)
    first = rows + learning(rows)
    one.run(lambda: one.arrived >= first)
    learned = len(one.steps)
    speed = one.run(lambda: one.arrived >= first + script.counted(rows))
    return {"arm": arm, "rows": rows, "seed": seed, "speed": round(speed, 2)} | means(
        one.steps[learned:]
    )


def means(steps: list[DeviceStep]) -> dict[str, float]:
    """Return the means of steps; what was promised over what came where a plan said so."""
    promising = [step for step in steps if step.promised_s]
    figures = {
        "ms": 1e3 * np.mean([step.seconds for step in steps]),
        "depth": np.mean([step.depth for step in steps]),
        "nodes": np.mean([step.nodes for step in steps]),
        "width": np.mean([step.width for step in steps]),
        "guarded": np.mean([bool(step.applied) for step in steps]),
    }
    if promising:
        emitted, seconds = (
            sum(getattr(s, name) for s in promising) for name in ("emitted", "seconds")
        )
        figures["promised_tokens"] = sum(step.promised_tokens for step in promising) / emitted
        figures["promised_s"] = sum(step.promised_s for step in promising) / seconds
    return {name: round(float(value), 3) for name, value in figures.items()}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best fixed length, what others bring over it with an interval over the seeds, and
    the part of the oracle's gain that the planner reaches.
    """
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["arm"], []).append(row["speed"])
    fixed = [arm for arm in speeds if arm not in ("none", "oracle", *ADAPTIVE)]
    best = max(fixed, key=lambda arm: float(np.mean(speeds[arm])))
    over = {arm: ratio_of_rates(speeds[arm], speeds[best]) for arm in speeds if arm not in fixed}
    figures: dict[str, Any] = {"best_fixed": best}
    for arm, ratio in over.items():
        figures[arm] = [round(value, 3) for value in (ratio.value, ratio.low, ratio.high)]
    return figures


def main() -> None:
    """Run, print a line for each load, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about = "scripts that it has already are kept unless they are run again"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=about)
    parser.add_argument("--loads", type=int, nargs="+", default=[*LOADS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scripts", nargs="+", choices=[*SCRIPTS], default=[*SCRIPTS])
    options, began_s = parser.parse_args(), process_time()
    recorded = DeviceRecord.read()
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    fixed = [f"{head} {length}" for head, lengths in FIXED.items() for length in lengths]
    for name in options.scripts:
        script = SCRIPTS[name]
        script_recorded = (
            recorded if script.rates is None else recorded._replace(rates=script.rates)
        )
        document[name] = {**records.stamp(), "summary": {}, "runs": []}
        for rows in options.loads:
            arms = ["none", *fixed, *ADAPTIVE, "oracle"]
            runs = [
                run(script_recorded, script, arm, rows, seed)
                for arm in arms
                for seed in options.seeds
            ]
            document[name]["runs"] += runs
            document[name]["summary"][str(rows)] = figures = summary(runs)
            print(name, rows, json.dumps(figures), flush=True)
            records.write(options.out, document)
    print(f"{process_time() - began_s:.0f} CPU seconds")


if __name__ == "__main__":
    main()
