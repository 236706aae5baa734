"""The planner's learned state as plain data: for a file, and back into another process.

Estimates of a draft go with its name, those of a tenant with the hash of its salt: a
planner takes up the drafts that it has, and begins afresh with those that are new to it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .acceptance import AcceptanceModel, AcceptanceState
from .latency import Correction
from .loops.acceptance import MAX_VARIANCE, MIN_VARIANCE
from .loops.times import MAX_CORRECTION, MAX_SHAPE, MAX_VERIFYING
from .plan import FloatArray
from .tenants import Tenants
from .trim import COUNTS, Calibration

SCHEMA = 15
_FACTORS = (1 / MAX_CORRECTION, MAX_CORRECTION)
_RANGES = {
    "factor": _FACTORS,
    "log_factor": (-MAX_SHAPE, MAX_SHAPE),
    "verifying": (0.0, MAX_VERIFYING),
    "variance": (MIN_VARIANCE, MAX_VARIANCE),
}
_SLACK = 1e-6  # by which sums of counts may be off


class LearnedError(ValueError):
    """Learnt data that cannot be used; the message names the field and the value."""


class Learnt(NamedTuple):
    """The parts of a planner's state that outlast its requests, under the names that they have
    there.
    """

    acceptance: AcceptanceState
    calibration: Calibration
    correction: Correction
    tenants: Tenants


def save_learnt(learnt: Learnt, drafts: Sequence[str], now: float) -> dict[str, Any]:
    """Return what was learnt as JSON-able data; empty before the first step.

    ``age_s`` is how long ago the evidence was aged: clocks of two processes have nothing in common.
    """
    acceptance = learnt.acceptance
    if acceptance.now == -math.inf:
        return {}
    ids = learnt.tenants.ids.tolist()
    tenants = [
        {"tenant": ids[place], **_of_tenant(learnt, drafts, place)}
        for place in learnt.tenants.last_turn.argsort(kind="stable").tolist()
    ]
    age_s = max(0.0, now - acceptance.now)
    of_all = {**_plain(learnt.correction, drafts), "age_s": age_s}
    return {"schema": SCHEMA, **of_all, "tenants": tenants}


def restore_learnt(
    data: Mapping[str, Any],
    start: Learnt,
    drafts: Sequence[str],
    model: AcceptanceModel,
    now: float,
    idle_s: float,
) -> Learnt:
    """Return ``start``, of these drafts, with what was saved ``idle_s`` ago.

    Raises LearnedError for data that do not fit.
    """
    if data.get("schema") != SCHEMA:
        raise LearnedError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
    data_of = _fit(data, _plain(start.correction, drafts))
    tenants = _tenants(data, start, drafts, model.most_tenants)
    acceptance, calibration, rows = start.acceptance, start.calibration, start.tenants
    if tenants:
        of = _rows([entry["drafts"] for entry in tenants.values()])
        acceptance = model.with_tenants(acceptance, len(tenants), [])
        acceptance = model.with_drafts(acceptance, of["accepted"], of["reached"])
        requests = np.array([float(entry["requests"]) for entry in tenants.values()])
        acceptance = acceptance.with_arrays(variance=of["variance"], requests=requests)
        calibration = Calibration.of(*(of[name] for name in COUNTS))
        turns = np.arange(len(tenants))
        rows = Tenants(np.array([*tenants], np.int64), turns, turn=len(tenants))
    target, factors = data_of["target"], _stack(data_of["drafts"])["factor"]
    acceptance = replace(acceptance, now=now - float(data_of["age_s"]) - max(0.0, idle_s))
    return Learnt(
        model.decayed_to(acceptance, now),
        calibration,
        Correction(
            np.array([target["factor"], 1.0, *factors]),
            *(target["log_factor"], target["seen"], target["log_factor"]),
            overhead_s=target["overhead_s"],
            verifying=np.array([float(target["verifying"]), float(target["verifying_steps"])]),
        ),
        rows,
    )


def without_times(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved as if nothing were known of times, for tables that are new. Raises
    KeyError for data that ``save_learnt`` has not made.
    """
    names = [*data["drafts"]]
    unknown = _plain(Correction.start(len(names)), names)
    return {**data, "target": unknown["target"], "drafts": unknown["drafts"]}


def _tenants(
    data: Mapping[str, Any], start: Learnt, drafts: Sequence[str], most: int
) -> dict[int, dict[str, Any]]:
    """Return what was saved of each tenant, the least recently used first."""
    form, tenants = _of_tenant(start, drafts, 0), {}
    entries = data.get("tenants")
    if not isinstance(entries, list):
        raise LearnedError(f"tenants must be a list, got {entries!r}")
    for entry in entries[-most:]:
        tenant = entry.get("tenant") if isinstance(entry, Mapping) else None
        if type(tenant) is not int or not -(1 << 63) <= tenant < 1 << 63:
            raise LearnedError(f"tenants must have a 'tenant' of 64 bits each, got {entry!r}")
        tenants[tenant] = _fit(entry, form, f"tenants.{tenant}.")
    return tenants


def _plain(correction: Correction, drafts: Sequence[str]) -> dict[str, Any]:
    """Return what was learnt of times; its caller sets the age."""
    target_factor, _, *factors = correction.factor.tolist()
    verifying, verifying_steps = correction.verifying.tolist()
    return {
        "age_s": 0.0,
        "target": {
            "factor": target_factor,
            "overhead_s": correction.overhead_s.tolist(),
            "log_factor": correction.log_factor.tolist(),
            "seen": correction.octave_steps.tolist(),
            "verifying": verifying,
            "verifying_steps": verifying_steps,
        },
        "drafts": _by_name(drafts, {"factor": np.array(factors)}),
    }


def _of_tenant(learnt: Learnt, drafts: Sequence[str], row: int) -> dict[str, Any]:
    """Return what a tenant's texts taught."""
    estimates = learnt.acceptance.estimates
    rows = slice(row * len(drafts), (row + 1) * len(drafts))
    columns = {
        "variance": estimates.variance[rows],
        "accepted": estimates.draft_accepted[rows],
        "reached": estimates.draft_reached[rows],
        **{name: getattr(learnt.calibration.counts, name)[rows] for name in COUNTS},
    }
    return {
        "requests": float(estimates.requests[row]),
        "drafts": _by_name(drafts, columns),
    }


def _by_name(drafts: Sequence[str], columns: Mapping[str, FloatArray]) -> dict[str, Any]:
    """Return lists by draft and name of columns [D, ...] by name."""
    names = enumerate(drafts)
    return {draft: {name: c[d].tolist() for name, c in columns.items()} for d, draft in names}


def _rows(tenants: Sequence[Mapping[str, Any]]) -> dict[str, FloatArray]:
    """Return the columns of tenants and drafts (``policy.tenants``)."""
    by_tenant = [_stack(drafts) for drafts in tenants]
    return {name: np.concatenate([of[name] for of in by_tenant]) for name in by_tenant[0]}


def _stack(drafts: Mapping[str, Mapping[str, FloatArray]]) -> dict[str, FloatArray]:
    """Return the inverse of ``_by_name``: columns [D, ...] by name."""
    entries = list(drafts.values())
    return {name: np.array([entry[name] for entry in entries]) for name in entries[0]}


def _fit(data: Any, form: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the fields of ``form`` as arrays of the shapes there; a new draft has the form's.

    Raises LearnedError for a field that is missing, or a value that cannot be.
    """
    if not isinstance(data, Mapping):
        raise LearnedError(f"{where[:-1]} must be an object, got {data!r}")
    fitted: dict[str, Any] = {}
    for name, part in form.items():
        if name not in data and not where.endswith("drafts."):
            raise LearnedError(f"{where}{name} is missing")
        value, path = data.get(name, part), f"{where}{name}"
        inner = isinstance(part, Mapping)
        fitted[name] = _fit(value, part, f"{path}.") if inner else _numbers(value, part, path)
    for name, whole in (("accepted", "reached"), ("matched", "nodes"), ("likeliest", "nodes")):
        if name in fitted:
            _check(f"{where}{name}", fitted[name], 0.0, fitted[whole] + _SLACK)
    if "claimed" in fitted:
        least, most = Calibration.claims(fitted["nodes"])
        _check(f"{where}claimed", fitted["claimed"], least - _SLACK, most + _SLACK)
    return fitted


def _numbers(value: Any, like: Any, path: str) -> FloatArray:
    """Return a value as an array of the shape of another, in the range of the field's name."""
    try:
        numbers = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise LearnedError(f"{path} must be numbers, got {value!r}") from None
    if numbers.shape != np.shape(like):
        raise LearnedError(f"{path} must have the shape {np.shape(like)}, got {numbers.shape}")
    least, most = _RANGES.get(path.rpartition(".")[2], (0.0, sys.float_info.max))
    _check(path, numbers, least, most)
    return numbers


def _check(path: str, value: FloatArray, least: Any, most: Any) -> None:
    """Raise LearnedError unless a value of any shape, such as [OCTAVES], is in a range."""
    if not np.all((value >= least) & (value <= most)):
        raise LearnedError(f"{path} is out of range: {value.tolist()}")
