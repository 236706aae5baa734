"""How soon a plan follows when acceptance changes at once: 0.9, then 0.1, then 0.9 again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from policy.plan import FloatArray
from policy.simulation.arms import make_policy
from policy.simulation.deployment import Deployment, perturb
from policy.simulation.fleet import simulate
from policy.simulation.replica import StepRecord
from policy.simulation.workload import Category, Drift, Mix, backlog, draw

HIGH, LOW = 0.9, 0.1
PHASES = ("start", "down", "up")
_SMOOTH_STEPS = 5
_ROWS = 8
_CURVE_POINTS = 300
_FASTEST_HZ = 800  # tokens a second of one request, more than any arm reaches


def shift_test(
    deployment: Deployment,
    arms: list[str],
    seed: int,
    output_tokens: int,
    table_error: float,
    phase_s: float,
) -> list[dict[str, Any]]:
    """Return by arm the mean length over time and, for both shifts, steps and seconds until it is
    within a token of the oracle's.

    Eight requests are in flight; with few ``output_tokens`` they turn over, with many the same ones
    go through both shifts, which come after ``phase_s`` and twice that.
    """
    deployment = replace(deployment, max_active=_ROWS)
    curves = {
        arm: _mean_lengths(deployment, arm, seed, output_tokens, table_error, phase_s)
        for arm in [*arms, "oracle"]
    }
    times, lengths = curves["oracle"]
    levels = [
        float(
            np.median(lengths[(times >= (phase + 0.5) * phase_s) & (times < (phase + 1) * phase_s)])
        )
        for phase in range(len(PHASES))
    ]
    return [
        {
            "arm": arm,
            "output_tokens": output_tokens,
            "seed": seed,
            **_follow_lengths(*curve, levels, phase_s),
        }
        for arm, curve in curves.items()
    ]


def _follow_lengths(
    times: FloatArray, lengths: FloatArray, levels: list[float], phase_s: float
) -> dict[str, Any]:
    """Return by phase when the lengths first come within a token of its level, and for which share
    of its steps they are.
    """
    result: dict[str, Any] = {}
    for phase, (name, level) in enumerate(zip(PHASES, levels, strict=True)):
        begin_s = phase * phase_s
        inside = np.flatnonzero((times >= begin_s) & (times < begin_s + phase_s))
        near = np.abs(lengths[inside] - level) <= 1.0
        first = int(np.argmax(near)) if near.any() else None
        result[name] = {
            "oracle_length": level,
            "steps": first,
            "seconds": None if first is None else float(times[inside[first]] - begin_s),
            "near_share": float(near.mean()),
        }
    keep = np.linspace(0, len(times) - 1, min(len(times), _CURVE_POINTS)).astype(int)
    return {
        **result,
        "curve": {
            "seconds": times[keep].round(3).tolist(),
            "length": lengths[keep].round(2).tolist(),
        },
    }


def _mean_lengths(
    deployment: Deployment,
    arm: str,
    seed: int,
    output_tokens: int,
    table_error: float,
    phase_s: float,
) -> tuple[FloatArray, FloatArray]:
    """Return the steps' start times and the mean proposed tokens per row, smoothed over the last
    five steps.
    """
    mix = Mix(
        "shift",
        (Category("shift", 1.0, 100, output_tokens, dict.fromkeys(deployment.drafts, HIGH)),),
        spread=0.2,
        draft_spread=0.1,
        length_spread=0.0 if output_tokens > 1000 else 0.6,
    )
    drop = np.log(LOW / (1 - LOW)) - np.log(HIGH / (1 - HIGH))
    knots_s = np.array([phase_s, phase_s + 1e-3, 2 * phase_s, 2 * phase_s + 1e-3])
    drift = Drift(
        knots_s,
        np.array([0.0, drop, drop, 0.0])[:, None, None] * np.ones((1, 1, len(deployment.drafts))),
    )
    requests = max(_ROWS, int(_ROWS * 3 * phase_s * _FASTEST_HZ / output_tokens))
    workload = draw(mix, deployment.drafts, backlog(requests), seed, deployment.k_max, 1.0, drift)
    policy = make_policy(
        arm, deployment, mix, workload, perturb(deployment.latency, table_error, seed), seed
    )
    steps: list[StepRecord] = simulate(
        deployment, workload, lambda: policy, seed, until_s=3 * phase_s
    ).steps
    times = np.array([step.start_s for step in steps])
    each = np.array([step.proposed / max(step.rows, 1) for step in steps])
    mean = np.convolve(each, np.ones(_SMOOTH_STEPS) / _SMOOTH_STEPS)[: len(each)]
    return times, mean
