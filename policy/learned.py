"""What the planner has learnt as plain data: for a file, and back from one into another process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .acceptance import MAX_VARIANCE, MIN_VARIANCE
from .calibration import COUNTS as NODE_COUNTS
from .calibration import Calibration
from .correction import MAX_CORRECTION, MAX_SHAPE, OCTAVES, Shape
from .plan import FloatArray

if TYPE_CHECKING:
    from .acceptance import AcceptanceModel, AcceptanceState
    from .planner_state import PlannerState

SCHEMA = 6
_ARRAYS = ("draft_accepted", "draft_reached")
_SHAPE = ("log_factor", "seen")
_SIGNED = ("shape_log_factor",)


class LearnedError(ValueError):
    """Learnt data that cannot be used; the message names the field and the value."""


def saved(state: PlannerState, now: float) -> dict[str, Any]:
    """Return what outlasts the requests of a state, JSON-able; empty before the first step.

    Evidence by draft, how requests and their groups deviate from it, and the correction of times. ``age_s`` is how long ago the evidence
    was aged: clocks of two processes have nothing in common.
    """
    acceptance = state.acceptance
    if acceptance.now == -math.inf:
        return {}
    return {
        "schema": SCHEMA,
        "age_s": max(0.0, now - acceptance.now),
        **{name: getattr(acceptance, name).tolist() for name in _ARRAYS},
        "variance": acceptance.variance.tolist(),
        "requests": acceptance.requests,
        "groups": _saved_groups(acceptance),
        "correction": state.correction.tolist(),
        **{f"calibration_{name}": getattr(state.calibration, name).tolist() for name in NODE_COUNTS},
        **{f"shape_{name}": getattr(state.target_shape, name).tolist() for name in _SHAPE},
    }


def restored(data: Mapping[str, Any], start: PlannerState, model: AcceptanceModel, now: float, idle_s: float) -> PlannerState:
    """Return ``start`` with the data in it, ``idle_s`` after they were saved. Raises LearnedError for data that do not fit."""
    if data.get("schema") != SCHEMA:
        raise LearnedError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
    arrays = {name: _array(data, name, getattr(start.acceptance, name).shape) for name in _ARRAYS}
    correction = _array(data, "correction", start.correction.shape)
    log_factor, seen = (_array(data, f"shape_{name}", (OCTAVES,)) for name in _SHAPE)
    _check("draft_accepted", arrays["draft_accepted"], arrays["draft_accepted"] <= arrays["draft_reached"] + 1e-6)
    variance = _array(data, "variance", start.acceptance.variance.shape)
    _check("variance", variance, (variance >= MIN_VARIANCE) & (variance <= MAX_VARIANCE))
    requests = float(_array(data, "requests", ()))
    groups = _groups(data.get("groups"), arrays["draft_reached"].shape, model.most_groups)
    calibration = _calibration(data, start.calibration)
    _check("correction", correction, (correction >= 1 / MAX_CORRECTION) & (correction <= MAX_CORRECTION))
    _check("shape_log_factor", log_factor, abs(log_factor) <= MAX_SHAPE)
    age_s = float(_array(data, "age_s", ())) + max(0.0, idle_s)
    acceptance = model.with_drafts(start.acceptance, arrays["draft_accepted"], arrays["draft_reached"])
    acceptance = replace(acceptance, variance=variance, requests=requests, now=now - age_s)
    acceptance = model.with_groups(acceptance, groups)
    shape = Shape(log_factor, seen, log_factor)
    return replace(start, acceptance=model.aged(acceptance, now), correction=correction, calibration=calibration, target_shape=shape)


def _calibration(data: Mapping[str, Any], start: Calibration) -> Calibration:
    """Return the calibration of these counts; claims within their bins, and no more held than seen."""
    names = [f"calibration_{name}" for name in NODE_COUNTS]
    counts = [_array(data, name, start.nodes.shape) for name in names]
    nodes, claimed, held = counts
    low, high = Calibration.claims(nodes)
    _check(names[1], claimed, (claimed >= low - 1e-6) & (claimed <= high + 1e-6))
    _check(names[2], held, held <= nodes + 1e-6)
    return Calibration.of(*counts)


def _saved_groups(acceptance: AcceptanceState) -> list[dict[str, Any]]:
    """Return groups as plain data, the least recently used first: their keys mean the same in every process."""
    counts = {group: acceptance.counts[:, slot].tolist() for group, slot in acceptance.groups.items()}
    return [{"group": group, "accepted": a, "reached": r} for group, (a, r) in counts.items()]


def _groups(data: Any, shape: tuple[int, ...], most: int) -> dict[int, FloatArray]:
    """Return the counts of groups, two of this shape each; of more than ``most`` the last used.

    Raises LearnedError for data that do not fit.
    """
    if not isinstance(data, list):
        raise LearnedError(f"groups must be a list, got {data!r}")
    known = {}
    for entry in data[max(len(data) - most, 0) :]:
        if not isinstance(entry, Mapping) or type(entry.get("group")) is not int or not -(1 << 63) <= entry["group"] < 1 << 63:
            raise LearnedError(f"groups must have integers of 64 bits as 'group', got {entry!r}")
        counts = accepted, reached = [_array(entry, name, shape) for name in ("accepted", "reached")]
        _check("accepted", accepted, accepted <= reached + 1e-6)
        known[entry["group"]] = np.array(counts)
    return known


def _array(data: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> FloatArray:
    """Return a field as an array; all but logarithms are counts, times and factors, hence never negative."""
    try:
        value = np.array(data[name], np.float64)
    except KeyError:
        raise LearnedError(f"{name} is missing") from None
    except (TypeError, ValueError):
        raise LearnedError(f"{name} must be numbers, got {data[name]!r}") from None
    if value.shape != shape:
        raise LearnedError(f"{name} must have the shape {shape}, got {value.shape}")
    _check(name, value, np.isfinite(value) & ((value >= 0) | (name in _SIGNED)))
    return value


def _check(name: str, value: Any, good: Any) -> None:
    if not np.all(good):
        raise LearnedError(f"{name} is out of range: {np.asarray(value).tolist()}")
