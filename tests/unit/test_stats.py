from dataclasses import replace
from time import sleep

import numpy as np
import pytest

from backend.ops import stats as module
from backend.ops.stats import Stats, StepStats
from backend.speculation.plan_metrics import PlanMetrics
from backend.speculation.step_log import StepLog
from policy import NO_DRAFT, Plan, StepNodes, Switches
from tests.fakes.outcomes import outcome_of

DRAFTS = ("small", "lookup")


def figures(stats):
    """Everything drained, by name and labels: totals of counters, lists of observations."""
    drained = stats.drain()
    return {
        (name, *labels.values()): value
        for kind in ("counters", "observations")
        for name, labels, value in getattr(drained, kind)
    }


def step(draft, length, accepted):
    draft, length, accepted = (np.array(column) for column in (draft, length, accepted))
    return outcome_of(
        np.arange(len(draft)),
        draft,
        length,
        accepted,
        accepted + 1,
        length,
        length,
        0.03,
        followed=accepted,
    )


def test_observations_over_the_limit_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(module, "MAX_OBSERVATIONS", 3)
    stats = Stats()
    stats.observe("spindle_batch_size", 1, 2)
    stats.observe("spindle_batch_size", 3, 4, 5)
    stats.observe("spindle_batch_size", 6)
    assert figures(stats) == {
        ("spindle_batch_size",): [1, 2, 3],
        ("spindle_fallback_total", "observations_dropped"): 3,
    }


def test_a_step_s_rows_are_counted_by_draft_and_arm():
    stats = Stats()
    outcome = step([0, 0, NO_DRAFT, 0], [4, 2, 0, 2], [3, 0, 0, 1])
    PlanMetrics(StepStats(stats)).step(
        Plan(outcome.rows.draft, outcome.rows.length, 0.02),
        outcome,
        DRAFTS,
        [False, True, True, True],
    )
    seen = figures(stats)
    assert seen["spindle_emitted_tokens_total", "planner", "small"] == 4
    assert seen["spindle_emitted_tokens_total", "fixed", "small"] == 3
    assert seen["spindle_emitted_tokens_total", "fixed", "none"] == 1
    assert seen["spindle_draft_tokens_total", "fixed", "small"] == 4
    assert seen["spindle_accepted_tokens_total", "fixed", "small"] == 1
    assert seen["spindle_draft_length", "fixed", "small"] == [2, 2]
    assert seen["spindle_step_predicted_seconds",] == [0.02]


@pytest.mark.parametrize(("verified", "label"), [(0, "0"), (1, "1"), (2, "more")])
def test_what_was_drafted_in_vain_is_counted(verified, label):
    stats = Stats()
    outcome = step([0, NO_DRAFT], [5, 0], [0, 0])
    outcome.rows.verified = np.array([verified, 0])
    plan = Plan(outcome.rows.draft, outcome.rows.length, 0.02, 2.5)
    PlanMetrics(StepStats(stats)).step(plan, outcome, DRAFTS, [False] * 2)
    seen = figures(stats)
    assert seen["spindle_drafted_steps_total", label] == 1
    promised = {key[0]: n for key, n in seen.items() if key[1:] == ("2",)}
    assert promised == {
        "spindle_promised_seconds_total": 0.02,
        "spindle_promised_tokens_total": 2.5,
        "spindle_planned_step_seconds_total": outcome.times.measured_s,
        "spindle_planned_step_tokens_total": 2,
    }


def test_nodes_are_counted_by_what_was_claimed_of_them():
    stats, none = Stats(), np.zeros(2, np.int64)
    nodes = StepNodes(
        row=np.array([0, 0, 1, 0]),
        confidence=np.array([0.91, 0.88, 1.0, 0.91]),
        sampled=np.array([True, True, False, False]),
        accepted=np.array([True, False, False, True]),
    )
    outcome = replace(step([0, 1], [1, 1], [0, 0]), nodes=nodes)
    PlanMetrics(StepStats(stats)).step(Plan(none, none), outcome, DRAFTS, [False, False])

    def counted(name):
        return {key[1:]: n for key, n in figures(stats).items() if key[0] == name}

    assert counted("spindle_draft_nodes_total") == {
        ("0.94", "small", "true"): 2,
        ("1.0", "lookup", "false"): 1,
        ("0.94", "small", "false"): 1,
    }
    PlanMetrics(StepStats(stats)).step(Plan(none, none), outcome, DRAFTS, [False, False])
    assert counted("spindle_draft_nodes_held_total") == {
        ("0.94", "small", "true"): 1,
        ("1.0", "lookup", "false"): 0,
        ("0.94", "small", "false"): 1,
    }


def test_what_the_planner_would_have_done_is_counted_apart():
    stats = Stats()
    (step_stats := StepStats(stats)).switches(Switches(speculation="shadow"))
    outcome, shadow = (
        step([NO_DRAFT] * 3, [0] * 3, [0] * 3),
        Plan(np.array([0, NO_DRAFT, 1]), np.array([3, 0, 5]), 0.04, 5.5),
    )
    PlanMetrics(step_stats).step(
        Plan(outcome.rows.draft, outcome.rows.length, shadow=shadow), outcome, DRAFTS, [False] * 3
    )
    seen = figures(stats)
    assert seen["spindle_emitted_tokens_total", "shadow", "none"] == 3
    assert seen["spindle_shadow_draft_length", "small"] == [3]
    assert seen["spindle_shadow_draft_length", "lookup"] == [5]
    assert seen["spindle_shadow_draft_length", "none"] == [0]
    assert seen["spindle_shadow_predicted_seconds_total",] == 0.04
    assert seen["spindle_shadow_predicted_tokens_total",] == 5.5
    assert ("spindle_step_predicted_seconds",) not in seen


def test_the_time_of_steps_is_counted_by_part():
    stats = Stats()
    for seconds in (0.02, 0.01):
        outcome = step([0], [1], [1])
        outcome.times.parts_s.update({"verify": seconds, "draft:small": 0.003})
        PlanMetrics(StepStats(stats)).step(
            Plan(outcome.rows.draft, outcome.rows.length, 0.02), outcome, DRAFTS, [False]
        )
    seen = figures(stats)
    assert seen["spindle_step_part_seconds_total", "verify"] == 0.03
    assert seen["spindle_step_part_seconds_total", "draft:small"] == 0.006


def test_the_parts_of_a_step_sum_to_its_time():
    log = StepLog(DRAFTS)
    for part in ("learning", "planning", "draft:small", "verify"):
        with log.part(part):
            sleep(0.002)
    outcome = log.outcome()
    stats = Stats()
    PlanMetrics(StepStats(stats)).step(
        Plan(np.array([NO_DRAFT]), np.array([0])), outcome, DRAFTS, []
    )
    parts = {
        key[1]: value
        for key, value in figures(stats).items()
        if key[0] == "spindle_step_part_seconds_total"
    }
    assert set(parts) == {"learning", "planning", "draft:small", "verify", "rest"}
    assert sum(parts.values()) == pytest.approx(outcome.times.measured_s)
    assert all(parts[name] >= 0.002 for name in parts if name != "rest")
    assert parts["rest"] < outcome.times.parts_s["overhead"]
