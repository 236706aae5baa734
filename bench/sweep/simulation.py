"""The sweep simulated and compared with what was measured: ``python -m bench.sweep.simulation
RECORD`` writes it into RECORD.

The simulator (``policy.simulation``) gets the latency tables that were served with, the same
requests (arrivals, tokens of prompts and texts) and, as the truth about drafts, for each request
the acceptance that the fixed choices saw on it (``bench.sweep.hazards``). Times that no table has
are measured once for the whole sweep, on its cold block, which is not scored (``MeasuredTimes``). A
planner's state goes on from block to block, as in the server.

Left out: prefixes shared within a run, trees, how acceptance changes within a text,
contention between the client and the server beyond the constants, and noise: every step takes its
mean time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from backend.config import PolicyConfig, ServingConfig, parse_config
from backend.engines.port import EngineLimits
from backend.ops.stats import Stats, StepStats
from backend.speculation.policy_factory import latency_model, make_policy
from bench import records
from bench.sweep.arms import ADAPTING, NONE, SPINDLE, Tuning, arm_config, fixed_choice
from bench.sweep.figures import blocks, is_closed, level
from bench.sweep.hazards import Hazards, fit
from policy.latency import LatencyCurve, LatencyModel, LatencyTable
from policy.plan import AnyPolicy, FloatArray, Outcome, Plan, Policy, View
from policy.simulation.deployment import Deployment
from policy.simulation.fleet import simulate, simulate_closed
from policy.simulation.workload import Acceptance, Drift, Workload, standard_normal, uniform

MOST_BLOCKS = 3
"""Warm blocks of a point that are simulated at the most."""
DRAWS = 2
"""Times that each is simulated, with other random numbers."""
WITHIN = 0.1

Run = dict[str, Any]
RunKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times that the tables do not have, measured on the cold block of closed loops, one number for
    the whole sweep.
    """

    target: float = 1.0
    """Measured over tabled time."""
    drafts: dict[str, float] = field(default_factory=dict)
    """The same by draft."""
    overhead_s: float = 0.0
    """Seconds of a step outside the engines, with the loop's way to the next."""
    speculation_s: float = 0.0
    """Additional time of a step that speculates."""
    planning_s: float = 0.0
    """Additional time of a step where a planner plans and learns."""
    way_s: float = 0.0
    """Seconds of a request outside of steps: HTTP or gRPC, tokens, the wait for a step's end with
    nothing else in flight.
    """

    def correct(self, latency: LatencyModel, names: Iterable[str]) -> LatencyModel:
        """Return the tables' times as these constants have them."""
        drafts = tuple(
            _scale(curve, self.drafts.get(name, 1.0))
            for name, curve in zip(names, latency.drafts, strict=True)
        )
        target = _scale(latency.target, self.target)
        return LatencyModel(
            target, drafts, overhead_s=self.overhead_s, speculation_s=self.speculation_s
        )


def _scale(curve: LatencyCurve, factor: float) -> LatencyCurve:
    return LatencyCurve(
        factor * curve.base_s,
        factor * curve.slope_s,
        factor * curve.row_s,
        factor * curve.context_s,
        factor * curve.node_context_s,
    )


class Lasting(Policy[Any]):
    """A policy whose state and clock outlast a simulation, and the times of its steps by part."""

    def __init__(self, policy: AnyPolicy) -> None:
        self._policy, self._state = policy, policy.start()
        self._began_s = self._now_s = 0.0
        self.parts_s: dict[str, float] = defaultdict(float)

    def start(self) -> Any:
        """Return the state so far."""
        self._began_s = self._now_s
        return self._state

    def plan(
        self, view: View, state: Any, now: float, rng: np.random.Generator
    ) -> tuple[Plan, Any]:
        """Plan on a clock that goes on."""
        return self._policy.plan(view, state, self._began_s + now, rng)

    def observe(self, outcome: Outcome, state: Any, now: float) -> Any:
        """Let the policy learn, and add the step up."""
        for part, seconds in (outcome.times.parts_s or {}).items():
            self.parts_s[part] += seconds
        self._now_s = self._began_s + now
        self._state = self._policy.observe(outcome, state, self._now_s)
        return self._state

    def drift(self, state: Any) -> dict[str, float]:
        """Return the policy's."""
        return self._policy.drift(state)


class SimulatedBlock(NamedTuple):
    """A block as simulated: latencies of its requests in seconds, steps, and the seconds that they
    took.
    """

    latency_s: list[float]
    steps: int
    step_s: float


class Simulation:
    """A sweep's record, and its runs by (workload, load, block, policy)."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._settings = record["settings"]
        self._tuning = _tuning(record)
        self._tables = {
            name: LatencyTable.from_dict(table) for name, table in record["tables"].items()
        }
        names = dict.fromkeys(run["policy"] for run in record["runs"])
        whole = blocks(record["runs"], list(names))
        self.runs = {
            (*point, number, name): run
            for point, by_block in whole.items()
            for number, block in by_block.items()
            for name, run in block.items()
        }
        self._fixed = [name for name in names if name.startswith("fixed-")]
        planners = [name for name in names if name in POLICIES or PolicyConfig(name).is_custom]
        self.policies = [NONE, *self._fixed, *planners]
        self.config = parse_config(
            arm_config(self._settings["config"], SPINDLE, self._tuning, self._settings["active"])
        )
        self._drafts = tuple(draft.name for draft in self.config.drafts)
        runs = [(key, run) for key, run in self.runs.items() if key[3] in self._fixed]
        free = [draft.kind.free for draft in self.config.drafts]
        self._hazards = fit(
            [(key[:3], *fixed_choice(key[3]), run) for key, run in runs],
            self._drafts,
            free,
            self.config.policy.k_max,
        )

    def policy(self, name: str) -> Lasting:
        """Return an arm's policy, which reads the tables as they are."""
        config = parse_config(
            arm_config(self._settings["config"], name, self._tuning, self._settings["active"])
        )
        engines = [
            SimpleNamespace(limits=EngineLimits(0, 0, 0, 0, 0, scores=True, free=draft.kind.free))
            for draft in config.drafts
        ]
        return Lasting(make_policy(config, engines, self._tables, StepStats(Stats())))  # type: ignore[arg-type]

    def serve(
        self,
        key: tuple[str, str, int],
        policy: Lasting,
        name: str,
        constants: MeasuredTimes,
        draw: int,
    ) -> SimulatedBlock:
        """Serve a block's requests."""
        deployment = self._deployment(name, constants)
        measured = self.runs[(*key, name)]["replies"]
        workload, load = self._workload(key, measured, deployment, constants, draw), key[1]
        if is_closed(load):
            run = simulate_closed(
                deployment, workload, policy, draw, int(level(load)), constants.way_s
            )
        else:
            run = simulate(deployment, workload, lambda: policy, draw)
        latency_s = run.latency_s + constants.way_s * (not is_closed(load))
        return SimulatedBlock(
            latency_s.tolist(), len(run.steps), sum(step.seconds for step in run.steps)
        )

    def _deployment(self, name: str, constants: MeasuredTimes) -> Deployment:
        config: ServingConfig = self.config
        drafts = () if name == NONE else self._drafts
        latency = constants.correct(latency_model(config, self._tables), self._drafts)
        latency = replace(latency, drafts=latency.drafts[: len(drafts)])
        free = tuple(draft.kind.free for draft in config.drafts)[: len(drafts)]
        limits = config.limits
        sizes: dict[str, Any] = {
            "max_active": limits.max_active_requests,
            "prefill_chunk_tokens": limits.prefill_chunk_tokens,
        }
        sizes |= {"kv_tokens": limits.kv_cache_tokens, "k_max": config.policy.k_max}
        return Deployment(
            "sweep",
            "measured",
            drafts,
            latency,
            free,
            **sizes,
            noise=0.0,
            planning_s=((1, constants.planning_s),),
        )

    def _workload(
        self,
        key: tuple[str, str, int],
        replies: list[dict[str, Any]],
        deployment: Deployment,
        constants: MeasuredTimes,
        draw: int,
    ) -> Workload:
        """Return a block's requests as they were served."""
        count = len(replies)
        due_s, prompt, output = (
            np.array([reply[name] for reply in replies])
            for name in ("due_s", "input_tokens", "output_tokens")
        )
        room = output + deployment.k_max
        start = np.concatenate([[0], np.cumsum(room)[:-1]])
        index = (
            np.repeat(np.arange(count), room),
            np.arange(int(room.sum())) - np.repeat(start, room),
        )
        strata = np.concatenate(
            [_strata(int(size), draw, number) for number, size in enumerate(room)]
        )
        truth: Hazards = self._hazards
        hazard, match_rate = (values[:, : len(deployment.drafts)] for values in truth.of(key))
        acceptance = Acceptance(
            logit=np.log(hazard / (1 - hazard)),
            category=np.zeros(count, np.int64),
            decay=truth.decay[: len(deployment.drafts)],
            drift=Drift.none(1, len(deployment.drafts)),
            match_rate=match_rate,
            start=start,
            uniform=strata,
            match=uniform(draw, 4, *index),
            normal=standard_normal(uniform(draw, 5, *index), uniform(draw, 6, *index)),
        )
        most = np.full(count, self._settings["max_tokens"])
        return Workload(due_s + constants.way_s, prompt, output, most, acceptance, None)

    def constants(self) -> MeasuredTimes:
        """Measure the constants: each a median over runs, since others may have used the machine
        meanwhile.
        """
        cold = {
            key: _sums(run) for key, run in self.runs.items() if key[2] == 0 and is_closed(key[1])
        }
        steady = [
            key for key in cold if key[3] in (NONE, *self._fixed)
        ]  # these do the same in any time
        tabled = {key: self._seconds_by_tables(key) for key in steady}

        def factor(part: str, keys: Iterable[RunKey]) -> float:
            pairs = ((cold[key].get(part, 0.0), tabled[key].get(part, 0.0)) for key in keys)
            return _middle(
                [
                    measured / predicted
                    for measured, predicted in pairs
                    if measured > 0 and predicted > 0
                ],
                1.0,
            )

        drafts = {
            draft: factor(f"draft:{draft}", [key for key in steady if draft == _draft(key[3])])
            for draft in self._drafts
        }
        most = max(level(key[1]) for key in cold)
        outside = {
            name: _middle([s["overhead"] / s["steps"] for key, s in cold.items() if key[3] == name])
            for name in self.policies
        }
        between = {
            name: _middle(
                [self._between(key) for key in cold if key[3] == name and level(key[1]) == most > 1]
            )
            for name in (NONE, SPINDLE)
        }
        overhead_s = outside[NONE] + between[NONE]
        speculation_s = max(0.0, _middle([outside[name] for name in self._fixed]) - outside[NONE])
        planning_s = max(0.0, outside[SPINDLE] + between[SPINDLE] - overhead_s - speculation_s)
        way_s = _middle(
            [self._way(key, between[NONE]) for key in cold if key[3] == NONE and level(key[1]) == 1]
        )
        return MeasuredTimes(
            factor("verify", steady), drafts, overhead_s, speculation_s, planning_s, way_s
        )

    def _seconds_by_tables(self, key: RunKey) -> dict[str, float]:
        """Return the seconds of a run by part, by the tables alone."""
        policy = self.policy(key[3])
        self.serve(key[:3], policy, key[3], MeasuredTimes(), 0)
        return policy.parts_s

    def _between(self, key: RunKey) -> float:
        """Return the seconds between two steps of a run in which the loop was never idle: with
        several in flight.
        """
        sums = _sums(self.runs[key])
        span_s = max(reply["due_s"] + reply["total_s"] for reply in self.runs[key]["replies"])
        return max(0.0, float((span_s - sums["seconds"]) / sums["steps"]))

    def _way(self, key: RunKey, between_s: float) -> float:
        """Return the seconds of a request outside of steps, of a run with one in flight."""
        sums, replies = (
            _sums(self.runs[key]),
            [reply["total_s"] for reply in self.runs[key]["replies"]],
        )
        rest_s = float(sum(replies) - sums["seconds"] - between_s * sums["steps"])
        return max(0.0, rest_s / len(replies))


def _draft(policy: str) -> str:
    return fixed_choice(policy)[0] if policy.startswith("fixed-") else ""


def _middle(values: list[float], otherwise: float = 0.0) -> float:
    return float(np.median(values)) if values else otherwise


def _strata(count: int, draw: int, number: int) -> FloatArray:
    """Return numbers of [0, 1) in random order, one from each of ``count`` equal parts.

    So a request has as many tokens accepted as it had; independent numbers would let requests of a
    batch differ more than they did.
    """
    rng = np.random.default_rng([draw, number])
    numbers: FloatArray = (rng.permutation(count) + rng.random(count)) / count
    return numbers


POLICIES = (*ADAPTING, SPINDLE)


def _tuning(record: dict[str, Any]) -> Tuning:
    tuning = record.get("tuning")
    return (
        Tuning(
            tuning["draft"],
            tuning["length"],
            tuple((batch, length) for batch, length in tuning["schedule"]),
        )
        if tuning
        else Tuning()
    )


def _sums(*runs: Run) -> dict[str, float]:
    """Return the steps of runs, their seconds, and those by part (``overhead`` includes
    planning).
    """
    sums: dict[str, float] = defaultdict(float)
    for run in runs:
        for name, value in run["counts"].items():
            if name.startswith("spindle_step_part_seconds_total"):
                sums[name.partition('part="')[2].partition('"')[0]] += value
        sums["seconds"] += run["counts"]["spindle_step_seconds_sum"]
        sums["steps"] += run["counts"]["spindle_step_seconds_count"]
    if "rest" in sums:  # older records have it whole, as overhead
        sums["overhead"] = sums.pop("rest") + sums.get("planning", 0.0) + sums.get("learning", 0.0)
    return sums


def missing(record: dict[str, Any]) -> str:
    """Return why a sweep cannot be simulated, '' when it can."""
    runs = record["runs"]
    if not any(run["block"] for run in runs):
        return "there is no warm block"
    if record["settings"].get("prefix") == "warm":
        return "prompts had been served before, which the simulation does not model"
    if "input_tokens" not in runs[0]["replies"][0] or "tables" not in record:
        return "the record has no prompt lengths or tables"
    if not any(run["policy"].startswith("fixed-") for run in runs):
        return "no fixed choice was run, which would tell acceptance"
    return (
        ""
        if any(is_closed(run["load"]) for run in runs)
        else "there is no closed loop to measure constants in"
    )


def compare(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``simulation``: a row a point and policy with its measured and predicted mean latency;
    and the constants.

    ``error`` is that of the latency. ``steps_error`` (too many: tokens too rarely accepted, batches
    otherwise composed) and ``step_time_error`` say where it comes from.
    """
    if why := missing(record):
        return {"simulation": [], "simulation_missing": why}
    simulation = Simulation(record)
    constants, rows = simulation.constants(), []
    points = dict.fromkeys(key[:2] for key in simulation.runs)
    work = [(*point, name) for point in points for name in simulation.policies]
    for workload, load, name in tqdm(
        work, desc="simulation", unit="point", mininterval=0.2 if sys.stderr.isatty() else 30
    ):
        numbers = sorted(
            key[2] for key in simulation.runs if key[:2] == (workload, load) and key[3] == name
        )[: MOST_BLOCKS + 1]
        rows.append(_row(simulation, (workload, load), name, numbers, constants))
    figures = {"blocks": MOST_BLOCKS, "draws": DRAWS, **asdict(constants)}
    return {"simulation": [row for row in rows if row], "simulation_constants": figures}


def _row(
    simulation: Simulation,
    point: tuple[str, str],
    name: str,
    numbers: list[int],
    constants: MeasuredTimes,
) -> dict[str, Any]:
    if not any(numbers):
        return {}
    workload, load = point
    predicted: list[SimulatedBlock] = []
    for draw in range(DRAWS):
        policy = simulation.policy(name)
        simulations = [
            simulation.serve((workload, load, block), policy, name, constants, draw)
            for block in numbers
        ]
        predicted += [run for run, block in zip(simulations, numbers, strict=True) if block]
    runs = [simulation.runs[workload, load, block, name] for block in numbers if block]
    seconds_s = (
        [reply["total_s"] for run in runs for reply in run["replies"]],
        [second for run in predicted for second in run.latency_s],
    )
    measured_s, predicted_s = (
        round(float(np.mean(values)), 5) for values in seconds_s
    )  # as written: the error is that of the record
    sums, steps = _sums(*runs), sum(run.steps for run in predicted)
    step_s = sum(run.step_s for run in predicted) / steps
    active = simulation.config.limits.max_active_requests
    return {
        "workload": workload,
        "load": load,
        "policy": name,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": round(predicted_s / measured_s - 1, 4),
        "steps_error": round(steps / DRAWS / sums["steps"] - 1, 4),
        "step_time_error": round(step_s / (sums["seconds"] / sums["steps"]) - 1, 4),
        "below_saturation": level(load) < (active if is_closed(load) else 1.0),
    }


def main() -> None:
    """Simulate a record's sweep and write it there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text("utf-8"))
    record |= compare(record)
    records.write(options.record, record)
    near = [abs(row["error"]) <= WITHIN for row in record["simulation"] if row["below_saturation"]]
    print(
        record.get("simulation_missing")
        or f"{sum(near)} of {len(near)} within {WITHIN:.0%} below saturation"
    )


if __name__ == "__main__":
    main()
