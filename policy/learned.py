"""What the planner has learnt as plain data: for a file, and back from one into another process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .correction import MAX_CORRECTION, MAX_SHAPE, OCTAVES, Shape
from .deviation import Law, bounded
from .plan import FloatArray
from .ranks import COUNTS, RankModel, RankState

if TYPE_CHECKING:
    from .acceptance import AcceptanceModel
    from .planner import PlannerState

SCHEMA = 3
_ARRAYS = ("draft_accepted", "draft_reached")
_SHAPE = ("log_factor", "seen")
_SIGNED = ("covariance", "shape_log_factor")


class LearnedError(ValueError):
    """Learnt data that cannot be used; the message names the field and the value."""


def saved(state: PlannerState, now: float) -> dict[str, Any]:
    """Return what outlasts the requests of a state, JSON-able; empty before the first step.

    Evidence by draft, how requests deviate from it, and the correction of times. ``age_s`` is how long ago the evidence was
    aged: clocks of two processes have nothing in common.
    """
    acceptance = state.acceptance
    if acceptance.now == -math.inf:
        return {}
    return {
        "schema": SCHEMA,
        "age_s": max(0.0, now - acceptance.now),
        **{name: getattr(acceptance, name).tolist() for name in _ARRAYS},
        "covariance": acceptance.law.covariance.tolist(),
        "requests": acceptance.law.requests,
        "correction": state.correction.tolist(),
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
    law = Law(_array(data, "covariance", start.acceptance.law.covariance.shape), float(_array(data, "requests", ())))
    _check("covariance", law.covariance, np.allclose(law.covariance, bounded(law.covariance)))
    _check("correction", correction, (correction >= 1 / MAX_CORRECTION) & (correction <= MAX_CORRECTION))
    _check("shape_log_factor", log_factor, abs(log_factor) <= MAX_SHAPE)
    age_s = float(_array(data, "age_s", ())) + max(0.0, idle_s)
    acceptance = replace(start.acceptance, law=law, now=now - age_s)
    acceptance = model.with_drafts(acceptance, arrays["draft_accepted"], arrays["draft_reached"])
    return replace(start, acceptance=model.aged(acceptance, now), correction=correction, target_shape=Shape(log_factor, seen, log_factor))


def restored_ranks(data: Any, model: RankModel, now: float, age_s: float) -> RankState:
    """Return the counts of second guesses in ``data``, ``age_s`` after they were saved. Raises LearnedError for data that do not fit."""
    if not isinstance(data, Mapping):
        raise LearnedError(f"ranks must be an object, got {data!r}")
    start = model.start()
    counts = {name: _array(data, name, getattr(start, name).shape) for name in COUNTS}
    for what in ("sibling", "rescue"):
        accepted, tested = counts[f"{what}_accepted"], counts[f"{what}_tested"]
        _check(f"{what}_accepted", accepted, accepted <= tested + 1e-6)
    return model.aged(replace(start, now=now - age_s, **counts), now)


def _array(data: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> FloatArray:
    """Return a field as an array; all but covariances and logarithms are counts, times and factors, hence never negative."""
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
