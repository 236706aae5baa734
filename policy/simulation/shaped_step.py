"""The true time of a step with cohorts or cut contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policy.cohorts import pipelined_s
from policy.plan import IntArray, TurnShape, View

from .deployment import Deployment, Work, step_parts


def with_newcomers(shape: TurnShape | None, newcomers: int) -> TurnShape | None:
    """Return a shape with rows for requests that have just ended their prompts."""
    if shape is None or shape.cohort is None:
        return shape
    return replace(shape, cohort=np.concatenate([shape.cohort, np.full(newcomers, -1)]))


def cohorts_of(shape: TurnShape | None) -> int:
    """Return how many cohorts a step runs."""
    return 1 if shape is None or shape.cohort is None else int(shape.cohort.max()) + 1


def shaped_step(
    deployment: Deployment, view: View, shape: TurnShape | None, work: Work, cohorts_before: int
) -> tuple[dict[str, float], float]:
    """Return the busy seconds by part, and those of the step, which are fewer where cohorts overlap.

    A batch that was not cut like this in the step before has nothing in flight: its first cohort's drafting overlaps nothing.
    """
    if cohorts_of(shape) == 1:
        parts_s = _parts(deployment, view, shape, work, np.arange(len(view)))
        return parts_s, sum(parts_s.values())
    assert shape is not None
    assert shape.cohort is not None
    contention, busy_s = deployment.shapes.contention or 1.0, dict[str, float]()
    draft_s, verify_s = [], []
    for c in range(cohorts_of(shape)):
        rows = np.flatnonzero(shape.cohort == c)
        others = work.rows - len(work.length) if c == 0 else 0
        contexts = int(view.context[rows].sum())
        part = replace(
            work,
            rows=len(rows) + others,
            context_tokens=contexts + (work.context_tokens - int(view.context.sum()) if c == 0 else 0),
            prefill_tokens=work.prefill_tokens if c == 0 else 0,
            free_rows=work.free_rows if c == 0 else {},
        )
        parts_s = _parts(deployment, view, shape, part, rows)
        verify_s.append(parts_s["verify"])
        draft_s.append(sum(parts_s.values()) - verify_s[-1])
        for name, seconds in parts_s.items():
            busy_s[name] = busy_s.get(name, 0.0) + contention * seconds
    step_s = pipelined_s(np.array(draft_s), np.array(verify_s), contention)
    return busy_s, step_s + (draft_s[0] if cohorts_before != cohorts_of(shape) else 0.0)


def _parts(deployment: Deployment, view: View, shape: TurnShape | None, work: Work, rows: IntArray) -> dict[str, float]:
    """Return the seconds by part of some rows of the view, one after the other."""
    columns = {name: getattr(work, name)[rows] for name in ("draft", "length", "catchup")}
    part = replace(work, **columns)
    parts_s = step_parts(deployment.latency, part, view.drafts)
    if deployment.shapes.pads and len(rows):
        context, piece = view.context[rows], shape.piece_tokens if shape is not None else None
        read = float(len(rows) * int(context.max()))
        if piece is not None:
            read = (piece + deployment.shapes.merge_tokens) * int((-(-context // piece)).sum())
        parts_s["verify"] += deployment.latency.target.context_s * (read - int(context.sum()))
    return parts_s
