"""Planners over two drafts and made-up times, and the views and outcomes of their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policy import (
    AcceptanceConfig,
    AdaptivePlanner,
    IntArray,
    LatencyModel,
    LatencyTable,
    Outcome,
    Plan,
    PlannerConfig,
    PlannerState,
    View,
)
from tests.fakes.outcomes import outcome_of

DRAFTS = ("small", "large")
RNG = np.random.default_rng(0)
UNSHAKEABLE = 1e12


def view(
    rows: int = 1, drafts: Sequence[str] = DRAFTS, k: Any = 8, context: int = 100, **changes: Any
) -> View:
    """Return a view of rows that may all draft up to ``k`` tokens; ``changes`` are its fields."""
    shape = rows, len(drafts)
    columns = {
        "request": np.arange(rows),
        "context": np.full(rows, context),
        "remaining": np.full(rows, 1000),
        "ceiling": np.broadcast_to(k, shape).astype(np.int64),
        "catchup": np.ones(shape, np.int64),
    }
    return View(tuple(drafts), **{**columns, **changes})


def latency(
    draft_s: Sequence[float] = (0.1, 0.25), token_s: float = 0.02, free_tokens: int = 8
) -> LatencyModel:
    """A target of one second up to ``free_tokens`` and a slope after; drafts at a share of it."""
    grid = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    seconds = {t: 1.0 + token_s * max(0, t - free_tokens) for t in grid}
    drafts = {
        f"d{i}": LatencyTable.synthetic(f"d{i}", {t: s * share for t, s in seconds.items()})
        for i, share in enumerate(draft_s)
    }
    return LatencyModel.from_tables(LatencyTable.synthetic("target", seconds), drafts)


def planner(
    model: LatencyModel | None = None, drafts: Sequence[str] = DRAFTS, **config: Any
) -> AdaptivePlanner:
    """Return a planner with these settings."""
    return AdaptivePlanner(tuple(drafts), model or latency(), PlannerConfig(**config))


def certain(rate: float, **config: Any) -> Mapping[str, Any]:
    """Return settings of a planner that knows the acceptance rate and does not explore."""
    return {
        "acceptance": AcceptanceConfig(prior_hazard=rate, prior_strength=UNSHAKEABLE),
        "explore_share": 0.0,
        **config,
    }


def outcome(
    seen: View, plan: Plan, accepted: IntArray | int, measured_s: float = 1.0, **changes: Any
) -> Outcome:
    """Return the outcome of a plan that was followed, with ``accepted`` tokens in each row."""
    accepted = np.minimum(accepted, plan.length)
    done = seen.request, plan.draft, plan.length, accepted, accepted + 1
    changes = {"view": seen, "plan": plan, **changes}
    return outcome_of(*done, plan.length, plan.length, measured_s, **changes)


def taught(p: AdaptivePlanner, steps: int = 60, start_s: float = 0.0) -> PlannerState:
    """Return the state after requests came and went; the small draft's tokens were accepted."""
    state, rng = p.start(), np.random.default_rng(3)
    for step in range(steps):
        seen = view(4, request=np.arange(4) + 4 * (step // 10))
        plan, state = p.plan(seen, state, start_s + step, RNG)
        finished = seen.request if step % 10 == 9 else np.zeros(0, np.int64)
        accepted = rng.integers(0, 9, 4)
        made = outcome(seen, plan, accepted, 1.7, parts_s={"verify": 1.7}, finished=finished)
        state = p.observe(made, state, start_s + step)
    return state
