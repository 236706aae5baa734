"""A deployment and a mix from the fit in ``advice.json`` of ``spindle advise``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from policy.latency import LatencyCurve, LatencyModel

from .deployment import Deployment
from .workload import Category, Mix

DRAFT = "draft"
_GRID_TOKENS = 4096
_ALWAYS = 0.98
"""The share of steps with a proposal below which the draft is a look-up."""


def read_advice(path: Path) -> tuple[Deployment, Mix]:
    """Return the server that was measured, with one draft called ``draft``. Prompt tokens take as
    long as proposed ones, and requests differ little. Raises ValueError for another file.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        fit = data["fit"]
        return _deployment(data, fit), _mix(fit)
    except (OSError, KeyError, TypeError, IndexError, ZeroDivisionError) as problem:
        raise ValueError(f"{path} has no fit of spindle advise: {problem!r}") from None


def _deployment(data: Mapping[str, Any], fit: Mapping[str, Any]) -> Deployment:
    seconds, tokens = fit["seconds"], np.arange(_GRID_TOKENS + 1, dtype=float)
    base_s = seconds["step"] + seconds["loaded"] + seconds["token"] * tokens
    for knot, slope_s in fit["bends"].items():
        base_s += slope_s * np.maximum(tokens - int(knot), 0.0)
    row_s = seconds["row"] + seconds["loaded_row"]
    target = LatencyCurve(base_s, float(base_s[-1] - base_s[-2]), row_s)
    draft_s = seconds["depth"] + seconds["depth_row"] * tokens
    draft = LatencyCurve(draft_s, seconds["depth_row"])
    latency = LatencyModel(target, (draft,), speculation_s=seconds["speculates"])
    most = max(int(row["in_flight"]) for row in data["intervals"])
    provenance = f"measured by spindle advise: {data['engine']} {data['date']}"
    return Deployment(
        "advice",
        provenance,
        (DRAFT,),
        latency,
        (fit["fired"] < _ALWAYS,),
        k_max=len(fit["survival"]),
        max_active=most,
        noise=fit["noise"],
    )


def _mix(fit: Mapping[str, Any]) -> Mix:
    """Return requests of the measured mean sizes, whose hazard falls by the mean factor."""
    reached = np.clip(np.array([1.0, *fit["survival"]]), 1e-6, 1.0)
    hazard = np.clip(reached[1:] / reached[:-1], 1e-3, 0.999)
    decay = float((hazard[-1] / hazard[0]) ** (1 / max(len(hazard) - 1, 1)))
    category = Category(
        "advice",
        1.0,
        max(round(fit["prompt_tokens"]), 1),
        max(round(fit["output_tokens"]), 1),
        {DRAFT: float(hazard[0])},
        match_rate={DRAFT: float(fit["fired"])},
    )
    return Mix("advice", (category,), {DRAFT: min(decay, 1.0)}, spread=0.2, draft_spread=0.1)
