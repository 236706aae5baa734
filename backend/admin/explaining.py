"""Why the last plan is what it is, for those who ask while the service runs."""

from __future__ import annotations

from time import monotonic
from typing import Any

from backend.core.orchestrator import Orchestrator
from policy import AdaptivePlanner, AnyPolicy, Wrapper
from policy.replay import explain, explain_batch

MOST_ROWS = 64
"""A row costs some ms, which the loop's thread shares."""


def explain_last(orchestrator: Orchestrator) -> dict[str, Any]:
    """Return ``age_s`` of the last plan that had rows, a line about its ``step`` and one for each
    of its ``requests`` (any thread).

    Plans and states are immutable values: it is explained as it was made, but for switches that
    kept the planner from applying it.
    """
    if (last := orchestrator.cycle.runner.last_plan) is None:
        return {"age_s": None, "step": "no step has been planned yet", "requests": []}
    view, state, plan, now = last
    reply: dict[str, Any] = {
        "age_s": round(monotonic() - now, 3),
        "step": explain_batch(plan),
        "requests": [],
    }
    planner: AnyPolicy = orchestrator.cycle.runner.policy
    while isinstance(planner, Wrapper):
        planner, state = planner.policy, state.inner
    if not isinstance(planner, AdaptivePlanner):
        reply["requests"] = ["the policy of this server is not the adaptive one"]
    elif len(view) > MOST_ROWS:
        reply["requests"] = [
            f"{len(view)} requests are more than the {MOST_ROWS} that are explained while serving"
        ]
    else:
        reply["requests"] = explain(planner, view, state, plan, now)
    return reply
