"""A suite of measurements as one JSON file: ``python -m tests.bench.run --suite policy --out FILE [--seed 0] [--instances 12000]``.

``policy``: what planning costs (``bench_planning``), and how good the optimiser's choice is. ``brute_force_mismatches`` counts, of
``instances`` random ones of up to three rows, those where it is worth less than the best of all choices by the oracle's scoring.
``gap`` (by rows x drafts x positions) is the distribution of what is lost at three to eight rows, both by the search of a first step (cold)
and by the knapsack of all others (warm); ``bound_distance`` of what the dual bound leaves open above: all as a share of what the step's
time is worth in tokens. ``flapping`` is how often a steady request's choice changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backend import machine
from policy.goodput import NO_HINT, Choice
from policy.hints import Last
from policy.optimiser import best_choice
from tests.bench.bench_planning import flapping, measure
from tests.bench.oracle import (
    Instance,
    best_by_enumeration,
    best_by_rows,
    random_instance,
    sizes,
    with_cap,
    with_given,
)

ROUNDS = 5
BATCHES = (1, 2, 3, 4, 8, 16, 64, 256)
MIDDLE = ((3, 4, 3), (4, 3, 3), (4, 4, 2), (5, 2, 3), (6, 2, 3), (7, 2, 2), (8, 2, 2))
LARGE = ((9, 4, 8), (16, 4, 8), (64, 4, 8), (256, 4, 8))


def found(instance: Instance, choice: Choice) -> float:
    """Return the objective of a choice by the oracle's scoring."""
    return instance.objective((*options(choice), *instance.given))


def options(choice: Choice) -> tuple[tuple[int, int], ...]:
    """Return a choice as the oracle writes it."""
    return tuple(zip(choice.draft.tolist(), choice.length.tolist(), strict=True))


def mismatches(count: int, rng: np.random.Generator) -> int:
    """Return how many of so many instances of up to three rows have a better choice than the optimiser's; some with given rows or a cap."""
    missed = 0
    for _ in range(count):
        instance = random_instance(rng, *sizes(rng))
        if len(instance.view) > 1 and rng.random() < 0.25:
            instance = with_given(instance, rng)
        if rng.random() < 0.25:
            instance = with_cap(instance, rng)
        best = best_by_enumeration(instance)
        missed += abs(found(instance, best_choice(instance.problem(), instance.price)[0]) - best) > 1e-9 * (1 + abs(best))
    return missed


def losses(size: tuple[int, int, int], count: int, rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Return what the choice loses against the best one, as a share: where nothing is known, and once a step has been planned."""
    cold, warm = [], []
    for _ in range(count):
        instance = random_instance(rng, *size)
        best = best_by_rows(instance)
        for hint, lost in ((NO_HINT, cold), (Last(rows=instance.rows).hint(instance.rows), warm)):
            choice, result, _ = best_choice(instance.problem(hint), instance.price)
            lost.append((best - found(instance, choice)) / (instance.price * result.charged_s))
    return cold, warm


def gaps(count: int, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return the distributions of what is lost, cold and warm, by size."""
    return {
        "x".join(map(str, size)): {name: distribution(lost) for name, lost in zip(("cold", "warm"), losses(size, count, rng), strict=True)}
        for size in MIDDLE
    }


def distances(size: tuple[int, int, int], count: int, rng: np.random.Generator) -> list[float]:
    """Return how far the choice is below the dual bound, as a share."""
    instances = [random_instance(rng, *size) for _ in range(count)]
    answers = [(instance.price, *best_choice(instance.problem(), instance.price)[1:]) for instance in instances]
    return [(bound - result.objective(price)) / (price * result.charged_s) for price, result, bound in answers]


def distribution(values: list[float]) -> dict[str, float]:
    """Return what a list of shares comes to; ``none`` is how many of them are nil."""
    quantiles = {f"p{q}": float(np.quantile(values, q / 100)) for q in (50, 90, 95, 99)}
    figures = {"mean": float(np.mean(values)), **quantiles, "worst": max(values), "none": float(np.mean(np.array(values) < 1e-9))}
    return {"instances": len(values), **{name: round(max(value, 0.0), 5) for name, value in figures.items()}}


def timed(seed: int) -> dict[str, dict[str, float]]:
    """Return what planning costs by batch size: of every figure the least of several rounds over all sizes, for others use the machine."""
    rounds = [{str(rows): measure(rows, 300, seed) for rows in BATCHES} for _ in range(ROUNDS)]
    return {rows: {name: min(each[rows][name] for each in rounds) for name in rounds[0][rows]} for rows in rounds[0]}


def policy(seed: int, instances: int) -> dict[str, Any]:
    """Run the suite of the policy."""
    enumerated, solved, bounded = (np.random.default_rng([seed, part]) for part in range(3))
    planning = timed(seed)
    return {
        "plan_p50_us": {rows: figures["plan_p50_us"] for rows, figures in planning.items()},
        "planning": planning,
        "brute_force_instances": instances,
        "brute_force_mismatches": mismatches(instances, enumerated),
        "gap": gaps(instances // 60, solved),
        "bound_distance": {"x".join(map(str, size)): distribution(distances(size, instances // 60, bounded)) for size in LARGE},
        "flapping": {str(rows): flapping(rows, 400, seed) for rows in (1, 4, 16, 64)},
    }


def main() -> None:
    """Run a suite and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=["policy"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instances", type=int, default=12_000)
    options = parser.parse_args()
    command = f"python -m tests.bench.run --suite {options.suite} --seed {options.seed} --instances {options.instances}"
    figures = {
        "command": command,
        "machine": machine.describe(),
        "timing": f"least of {ROUNDS} rounds",
        "load_average": os.getloadavg()[0],
        **policy(options.seed, options.instances),
    }
    options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
