"""What the trim is worth with a made-up draft, and what it takes.

    python -m bench.micro.trim

Four rows draft chains of eight tokens, each with a chance of its own to hold, Beta(1.6, 0.7). The
draft claims a power of the chance of a path. The price of a node's time falls twice. Printed by
price is the net worth, in tokens a row and step, of the second half of the steps, as a share of
what who knows the chances gets, with the nodes verified a row: of the length that is best in
hindsight, of the claims as they are, of calibrated ones, and of those learnt from every node of
which the emitted tokens tell, failures behind what was verified among them. Then microseconds of
the thread's CPU time, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from policy import LatencyCurve, LatencyModel, View
from policy.latency import Times
from policy.plan import Drafted, Plan
from policy.trim import Calibration, best_first, trimmed

ROWS, TOKENS, STEPS = 4, 8, 1500
PRICES = (0.6, 0.3, 0.15)
"""Of a node's time in tokens, one after the other."""
ARMS = ("length", "claims", "calibrated", "all known")


def worth(arm: str, power: float, seed: int) -> list[tuple[float, float]]:
    """Return (net worth a row, nodes a row) of an arm by price."""
    rng, calibration, found = np.random.default_rng(seed), Calibration.none(1), []
    row, depth = np.arange(ROWS).repeat(TOKENS), np.arange(TOKENS)
    none = np.zeros(ROWS * TOKENS, np.int64)
    for price in PRICES:
        verify_s, net, nodes = price * np.arange(ROWS * TOKENS + 1), 0.0, 0
        for step in range(STEPS):
            hazard = rng.beta(1.6, 0.7, (ROWS, TOKENS))
            held = np.cumprod(rng.random((ROWS, TOKENS)) < hazard, 1) > 0
            claimed = np.cumprod(hazard, 1).ravel() ** power
            likely = calibration.probability(none, none > 0, claimed)
            likely = {"truth": claimed ** (1 / power), "claims": claimed}.get(arm, likely)
            if arm == "length":
                survival = (1.6 / 2.3) ** np.arange(1, TOKENS + 1)
                verified = np.full(ROWS, (survival > price).sum())
            else:
                verified = best_first(row, likely, verify_s, 1.0, ROWS)
            taken = held & (depth < verified[:, None])
            if step >= STEPS // 2:
                net, nodes = net + taken.sum() - price * verified.sum(), nodes + verified.sum()
            known = depth <= verified[:, None]
            if arm == "all known":
                emitted = taken.sum(1) + 1
                known = (depth < emitted[:, None]) | (held.sum(1) < emitted)[:, None]
            seen = known.ravel()
            zero = none[seen]
            calibration = calibration.learnt(zero, zero > 0, claimed[seen], held.ravel()[seen])
        rows = ROWS * (STEPS - STEPS // 2)
        found.append((net / rows, nodes / rows))
    return found


def median_us(call: Callable[[], object]) -> float:
    """Return the median of 21 timings of 200 calls."""
    times = []
    for _ in range(21):
        started = time.thread_time()
        for _ in range(200):
            call()
        times.append((time.thread_time() - started) / 200)
    return 1e6 * statistics.median(times)


def costs(rows: int, nodes: int) -> str:
    """Return what the trim, the look-up and learning take for so many nodes a row."""
    rng, n, calibration = np.random.default_rng(0), rows * nodes, Calibration.none(2)
    for _ in range(50):
        claimed = rng.random(64)
        held = rng.random(64) < claimed**2
        calibration = calibration.learnt(rng.integers(0, 2, 64), held, claimed, held)
    row = np.arange(rows).repeat(nodes)
    confidence = np.cumprod(rng.random((rows, nodes)) ** 0.3, 1).ravel()
    drafted = Drafted(row, row % 2, confidence, row % 3 == 0)
    ones, square = np.ones(rows, np.int64), np.ones((rows, 2), np.int64)
    view = View(("a", "b"), np.arange(rows), ones, ones, square, square, ones > 0)
    plan = Plan(np.zeros(rows, np.int64), ones, price=20.0)
    target = LatencyCurve(np.linspace(0.02, 0.05, 300), 1e-4)
    latency, held = LatencyModel(target, LatencyModel.unit(2).drafts), rng.random(n) < 0.5
    times, columns = Times(latency, np.ones(4)), (drafted.draft, drafted.drawn, confidence)
    calls: tuple[Callable[[], object], ...] = (
        lambda: trimmed(times, calibration, view, plan, drafted),
        lambda: calibration.probability(*columns),
        lambda: calibration.learnt(*columns, held),
    )
    trim, look, learn = map(median_us, calls)
    took = f"trim {trim:5.1f}, look-up in it {look:4.1f}, learning {learn:5.1f}"
    return f"{rows:4} x {nodes:3}: {took}"


def main() -> None:
    """Print both."""
    seeds = range(3)
    for power, claims in ((1.0, "as it is"), (0.5, "its root"), (2.0, "its square")):
        truth = np.array([worth("truth", power, seed) for seed in seeds])
        for arm in ARMS:
            got = np.array([worth(arm, power, seed) for seed in seeds])
            share, nodes = (got / truth).mean(0)[:, 0], got.mean(0)[:, 1]
            cells = (f"{s:.3f} ({n:.2f})" for s, n in zip(share, nodes, strict=True))
            print(f"claims {claims:10} {arm:10}", *cells)
    for rows, nodes in ((1, 8), (1, 64), (8, 8), (8, 64), (64, 8)):
        print(costs(rows, nodes))


if __name__ == "__main__":
    main()
