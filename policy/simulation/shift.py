"""How soon a plan follows when acceptance changes at once: 0.9, then 0.1, then 0.9 again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.plan import FloatArray

from .arms import make_policy
from .deployment import Deployment, perturbed
from .fleet import simulate
from .replica import Step
from .workload import Category, Drift, Mix, backlog, draw

HIGH, LOW = 0.9, 0.1
_SMOOTH_STEPS = 5
_ROWS = 8
_FASTEST_HZ = 800  # tokens a second of one request, more than any arm reaches


def shift_test(deployment: Deployment, arm: str, seed: int, output_tokens: int, table_error: float, phase_s: float) -> dict[str, Any]:
    """Return the mean length over time and, for both shifts, steps and seconds until it stays within a token of the oracle's.

    Eight requests are in flight; with few ``output_tokens`` they turn over, with many the same ones go through both shifts, which come
    after ``phase_s`` and twice that.
    """
    deployment = replace(deployment, max_active=_ROWS)
    curves = {name: _mean_lengths(deployment, name, seed, output_tokens, table_error, phase_s) for name in (arm, "oracle")}
    times, lengths = curves[arm]
    result: dict[str, Any] = {"arm": arm, "output_tokens": output_tokens, "seed": seed}
    for phase, name in enumerate(("start", "down", "up")):
        begin_s, end_s = phase * phase_s, (phase + 1) * phase_s
        oracle_times, oracle = curves["oracle"]
        level = float(np.median(oracle[(oracle_times >= (begin_s + end_s) / 2) & (oracle_times < end_s)]))
        inside = np.flatnonzero((times >= begin_s) & (times < end_s))
        near = np.abs(lengths[inside] - level) <= 1.0
        first = int(np.argmax(near)) if near.any() else len(near)
        result[name] = {
            "oracle_length": level,
            "steps": first if near.any() else None,
            "seconds": float(times[inside[first]] - begin_s) if near.any() else None,
            "steps_in_phase": len(inside),
            "near_share": float(near.mean()),
        }
    keep = np.linspace(0, len(times) - 1, min(len(times), 400)).astype(int)
    result["curve"] = {"seconds": times[keep].round(3).tolist(), "length": lengths[keep].round(2).tolist()}
    return result


def _mean_lengths(
    deployment: Deployment, arm: str, seed: int, output_tokens: int, table_error: float, phase_s: float
) -> tuple[FloatArray, FloatArray]:
    """Return the steps' start times and the mean proposed tokens per row, smoothed over the last five steps."""
    mix = Mix(
        "shift",
        (Category("shift", 1.0, 100, output_tokens, dict.fromkeys(deployment.drafts, HIGH)),),
        spread=0.2,
        draft_spread=0.1,
        length_spread=0.0 if output_tokens > 1000 else 0.6,
    )
    drop = np.log(LOW / (1 - LOW)) - np.log(HIGH / (1 - HIGH))
    knots_s = np.array([phase_s, phase_s + 1e-3, 2 * phase_s, 2 * phase_s + 1e-3])
    drift = Drift(knots_s, np.array([0.0, drop, drop, 0.0])[:, None, None] * np.ones((1, 1, len(deployment.drafts))))
    requests = max(_ROWS, int(_ROWS * 3 * phase_s * _FASTEST_HZ / output_tokens))
    workload = draw(mix, deployment.drafts, backlog(requests), seed, deployment.k_max, 1.0, drift)
    policy = make_policy(arm, deployment, mix, workload, perturbed(deployment.latency, table_error, seed), seed)
    steps: list[Step] = simulate(deployment, workload, lambda: policy, seed, until_s=3 * phase_s).steps
    times = np.array([step.start_s for step in steps])
    each = np.array([step.proposed / max(step.rows, 1) for step in steps])
    mean = np.convolve(each, np.ones(_SMOOTH_STEPS) / _SMOOTH_STEPS)[: len(each)]
    return times, mean
