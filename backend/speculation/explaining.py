"""Explains the last plan to operators while the service runs."""

from __future__ import annotations

from time import monotonic
from typing import Any

from backend.speculation.cycle import Cycle
from policy import AdaptivePlanner, AnyPolicy, Plan, Wrapper
from policy.guard import GuardVerdict
from policy.levels import bucket_of, rows_of
from policy.replay import explain, explain_batch

MOST_ROWS = 64
"""A row costs some ms, which the loop's thread shares."""


def explain_last(cycle: Cycle) -> dict[str, Any]:
    """Return ``age_s`` of the last plan that had rows, a line about its ``step`` and one for each
    of its ``requests`` (any thread).

    Plans and states are immutable values: it is explained as it was made, but for switches that
    kept the planner from applying it.
    """
    if (last := cycle.runner.last_plan) is None:
        return {"age_s": None, "step": "no step has been planned yet", "requests": []}
    view, state, plan, now = last
    runner = cycle.runner
    guard = _guard_words(plan, runner.verdicts())
    promise = _promise_words(plan, runner.metrics.promise(rows_of(bucket_of(len(plan.length)))))
    words = [*promise, *_verifying_words(runner.drift()), *guard, *cycle.drafting.remarks()]
    reply: dict[str, Any] = {
        "age_s": round(monotonic() - now, 3),
        "step": "; ".join([explain_batch(plan), *words]),
        "requests": [],
    }
    planner: AnyPolicy = runner.policy
    while isinstance(planner, Wrapper):
        planner, state = planner.policy, state.inner
    if not isinstance(planner, AdaptivePlanner):
        reply["requests"] = ["the policy of this server is not the adaptive one"]
    elif _level_of(plan) == "none":
        reply["requests"] = [f"all requests: {guard[-1]}"]
    elif plan.notes.get("first_plain"):
        reply["requests"] = ["all requests: plain, to measure the time of such steps"]
    elif len(view) > MOST_ROWS:
        reply["requests"] = [
            f"{len(view)} requests are more than the {MOST_ROWS} that are explained while serving"
        ]
    else:
        reply["requests"] = explain(planner, view, state, plan, now)
    return reply


def _level_of(plan: Plan) -> str:
    """Return the level of ``policy.levels`` that a plan was made by."""
    level: str = plan.notes.get("experiment") or plan.notes.get("guard") or "planned"
    return level


def _promise_words(plan: Plan, ratios: tuple[float, float] | None) -> list[str]:
    """Return how far the latest plans at the load of a plan kept what they promised."""
    if ratios is None:
        return []
    rows = rows_of(bucket_of(len(plan.length)))
    tokens, seconds = ratios
    return [
        f"with {rows} in flight {tokens:.2f}x the planned tokens come in {seconds:.2f}x the time"
    ]


def _verifying_words(drift: dict[str, float]) -> list[str]:
    """Return how much longer passes take than the tables say, if they verify any."""
    if (factor := drift.get("verifying", 1.0)) <= 1.01:
        return []
    return [f"in passes that verify, decoding takes {factor:.2f}x the time"]


def _guard_words(plan: Plan, verdicts: list[GuardVerdict]) -> list[str]:
    """Return what the guard found at the load of a plan, and what it does about it."""
    rows = rows_of(bucket_of(len(plan.length)))
    words = [
        f"with {rows} in flight the planner's choice measures {verdict.ratio:.2f}x plain decoding"
        for verdict in verdicts
        if verdict.rows == rows and verdict.ratio == verdict.ratio
    ]
    if (level := plan.notes.get("guard", "planned")) != "planned":
        words.append(f"the guard applies {_WORDS[level]}")
    if level := plan.notes.get("experiment"):
        words.append(f"the guard tries {_WORDS[level]} in this step")
    return words


_WORDS = {
    "planned": "the planner's choice",
    "none": "no speculation",
}
