"""How good the search is and what planning costs, as one JSON file:

    python -m bench.micro.search --out FILE [--seed 0] [--instances 4000]

``lost`` is the distribution of what the search's choice is worth less than the best of all choices
by the oracle's scoring, as a share of what the step's time is worth in tokens: on ``instances`` of
each size up to three rows, every fourth under a cap and every fourth with rows already decided, and
by rows x drafts x positions on half as many of three to eight rows. ``planning`` is by drafts and
batch (``bench_planning``). ``flapping`` is how often a steady request's choice changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import records
from bench.micro.choices import best_choice
from bench.micro.oracle import (
    Instance,
    best_by_enumeration,
    best_by_rows,
    random_instance,
    sizes,
    with_cap,
    with_given,
)
from bench.micro.planning import flapping, measure
from policy.problem import Choice

ROUNDS = 5
BATCHES = (1, 4, 16, 64, 256)
MIDDLE = ((4, 3, 3), (5, 2, 3), (6, 2, 3), (8, 2, 2))


def value_of(instance: Instance, choice: Choice) -> float:
    """Return the objective of a choice by the oracle's scoring."""
    return instance.objective((*options(choice), *instance.fixed_choices))


def options(choice: Choice) -> tuple[tuple[int, int], ...]:
    """Return a choice as the oracle writes it."""
    return tuple(zip(choice.draft.tolist(), choice.length.tolist(), strict=True))


def small(rows: int, count: int, rng: np.random.Generator) -> Iterable[Instance]:
    """Yield instances that can be enumerated, some with given rows or a cap."""
    while count:
        size = sizes(rng)
        if size[0] != rows:
            continue
        instance = random_instance(rng, *size)
        if rows > 1 and rng.random() < 0.25:
            instance = with_given(instance, rng)
        if rng.random() < 0.25:
            instance = with_cap(instance, rng)
        count -= 1
        yield instance


def losses(instances: Iterable[Instance], best: Callable[[Instance], float]) -> list[float]:
    """Return what the choice loses against the best one, as a share."""
    shares = []
    for instance in instances:
        choice, result = best_choice(instance.problem(), instance.price)
        missed = best(instance) - value_of(instance, choice)
        shares.append(missed / (instance.price * result.charged_s))
    return shares


def losses_by_size(count: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the distributions of what is lost, by size."""
    rng = np.random.default_rng([seed, 0])
    by_size = {
        str(rows): losses(small(rows, count, rng), best_by_enumeration) for rows in (1, 2, 3)
    }
    for size in MIDDLE:
        instances = (random_instance(rng, *size) for _ in range(count // 2))
        by_size["x".join(map(str, size))] = losses(instances, best_by_rows)
    return {size: distribution(values) for size, values in by_size.items()}


def distribution(values: list[float]) -> dict[str, float]:
    """Return quantiles of a list of shares; ``none`` is how many of them are nil."""
    shares = np.array(values)
    quantiles = {f"p{q}": float(np.quantile(shares, q / 100)) for q in (50, 90, 95, 99)}
    nil = float(np.mean(shares < 1e-9))
    figures = {"mean": float(shares.mean()), **quantiles, "worst": float(shares.max()), "none": nil}
    rounded = {name: round(max(value, 0.0), 5) for name, value in figures.items()}
    return {"instances": len(values), **rounded}


def time_planning(drafts: int, seed: int) -> dict[str, dict[str, float]]:
    """Return what planning costs by batch size: of every figure the least of several rounds over
    all sizes, for others use the machine.
    """
    rounds = [{str(n): measure(n, drafts, 300, seed) for n in BATCHES} for _ in range(ROUNDS)]
    return {
        rows: {name: min(each[rows][name] for each in rounds) for name in figures}
        for rows, figures in rounds[0].items()
    }


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instances", type=int, default=4_000)
    options = parser.parse_args()
    figures = {
        "timing": f"least of {ROUNDS} rounds",
        "load_average": os.getloadavg()[0],
        "planning": {str(drafts): time_planning(drafts, options.seed) for drafts in (2, 4)},
        "lost": losses_by_size(options.instances, options.seed),
        "flapping": {str(rows): flapping(rows, 400, options.seed) for rows in (1, 4, 16, 64)},
    }
    records.write(options.out, figures)


if __name__ == "__main__":
    main()
