"""The planner of engines that can do more than one proposal a row: what it plans and refuses."""

from dataclasses import replace

import numpy as np
import pytest

from policy import NO_DRAFT, AcceptanceConfig, LatencyModel, Plan, PlannerConfig
from policy.latency import LatencyCurve
from policy.shaped import ShapedPlanner
from policy.shapes import CHAINS_ONLY, COHORTS, PIECES, Shapes
from tests.unit.test_policy_planner import RNG, UNSHAKEABLE, latency, outcome, planner, view

ONE = ("small",)


def line(fixed_s, token_s, context_s=0.0):
    return LatencyCurve(np.array([fixed_s, fixed_s + token_s]), token_s, 0.0, context_s)


def shaped(model, drafts=ONE, rate=0.6, **shapes):
    """A planner that knows the acceptance rate of chains and does not explore."""
    acceptance = AcceptanceConfig(prior_hazard=rate, prior_strength=UNSHAKEABLE, request_variance=1e-3)
    config = PlannerConfig(acceptance=acceptance, explore_share=0.0, k_max=4)
    return ShapedPlanner(drafts, model, config, Shapes(**shapes))


def planned(made, seen, steps=1):
    """The plan of a step after so many for the same batch; only cohorts need more than one."""
    state = made.start()
    for _ in range(steps):
        plan, state = made.plan(seen, state, 0.0, RNG)
    return plan


def test_an_engine_that_declares_nothing_gets_chains_and_constant_reasons():
    for made in (planner(), ShapedPlanner(("small", "large"), latency())):
        plan = planned(made, view(3))
        assert plan.shape is None
        assert plan.notes["why_not"] == CHAINS_ONLY
        rest, state = made.plan(view(4, ceiling=np.zeros((4, 2), np.int64)), made.start(), 0.0, RNG)
        rest, _ = made.plan(view(4, ceiling=np.zeros((4, 2), np.int64)), state, 0.0, RNG)
        assert "kept" in rest.notes
        assert set(rest.notes["why_not"]) == set(CHAINS_ONLY)


def test_beside_another_arm_s_rows_nothing_but_chains_is_planned():
    made = shaped(OVERLAPPING, cohorts=2, contention=1.0)
    given = Plan(np.full(2, NO_DRAFT), np.zeros(2, np.int64))
    plan = planned(made, view(2, ONE, control=np.array([True, False]), given=given))
    assert plan.shape is None
    assert plan.notes["why_not"][COHORTS] == "rows of another arm"


# -- cohorts and cut contexts


OVERLAPPING = LatencyModel(line(0.2, 0.01), (line(0.01, 0.005),))
"""Drafting for sixteen rows takes longer than reading the target's weights once more."""


def test_cohorts_are_planned_where_drafting_and_verifying_scale_with_the_rows_and_not_where_they_do_not():
    weights_bound = LatencyModel(line(1.0, 0.001), (line(0.3, 0.0),))
    plan = planned(shaped(OVERLAPPING, rate=0.97, cohorts=2, contention=1.0), view(16, ONE), 40)
    assert plan.shape.cohort.tolist() == [0] * 8 + [1] * 8
    assert COHORTS not in plan.notes["why_not"]
    plan = planned(shaped(weights_bound, rate=0.95, cohorts=2, contention=1.05), view(8, ONE))
    assert plan.shape is None
    assert plan.notes["why_not"][COHORTS].startswith("does not pay: 0.")
    assert planned(shaped(weights_bound, cohorts=2), view(8, ONE)).notes["why_not"][COHORTS] == "contention is not measured"
    assert planned(shaped(weights_bound, cohorts=2, contention=1.0), view(1, ONE)).notes["why_not"][COHORTS] == "one row"


def test_cohorts_shorten_the_predicted_step():
    one, two = (planned(shaped(OVERLAPPING, rate=0.97, cohorts=most, contention=1.0), view(16, ONE), 40) for most in (1, 2))
    assert one.length.any()
    assert two.shape.cohort.max() == 1
    assert two.predicted_s < one.predicted_s
    assert two.predicted_tokens == one.predicted_tokens


def test_cohorts_begin_when_they_would_have_saved_their_first_round_and_end_when_they_have_lost_as_much():
    made = shaped(OVERLAPPING, rate=0.97, cohorts=2, contention=1.0)
    state, running = made.start(), []
    for rows in [16] * 20 + [2] * 20 + [16, 2] * 10:
        plan, state = made.plan(view(rows, ONE), state, 0.0, RNG)
        running.append(plan.shape is not None)
    begun = running.index(True)
    assert 0 < begun < 20
    assert all(running[begun:21])
    ended = running.index(False, begun)
    assert 20 < ended < 40
    assert np.count_nonzero(np.diff(running[40:])) <= 1


def test_a_padding_engine_s_contexts_are_cut_and_the_padding_that_is_left_is_paid_for():
    model = LatencyModel(line(0.05, 0.0, 1e-4), (line(0.01, 0.0),))
    seen = view(4, ONE, context=np.array([1600, 64, 64, 64]))
    plans = {pads: planned(shaped(model, pads=pads, merge_tokens=8.0), seen) for pads in (False, True)}
    assert plans[True].shape.piece_tokens == 64
    assert PIECES not in plans[True].notes["why_not"]
    assert plans[False].shape is None
    work, ragged = 28 * (64 + 8), 1792
    assert np.array_equal(plans[True].length, plans[False].length)
    assert plans[True].predicted_s - plans[False].predicted_s == pytest.approx(1e-4 * (work - ragged))
    even = planned(shaped(model, pads=True, merge_tokens=8.0), view(4, ONE))
    assert even.shape is None
    assert even.notes["why_not"][PIECES].startswith("does not pay: 0.")


@pytest.mark.parametrize(
    "setting",
    [{"cohorts": 0}, {"contention": 0.9}, {"merge_tokens": -1.0}, {"block_tokens": 0}],
)
def test_a_capability_out_of_range_is_an_error_that_names_it(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} must be >= .*, got {value}"):
        Shapes(**setting)
    with pytest.raises(ValueError, match="cohorts must be 1 for an engine that pads"):
        Shapes(pads=True, cohorts=2)


# -- what it learns


FLAT = LatencyModel(line(0.5, 0.001, 1e-4), (line(0.01, 0.0), line(0.02, 0.0)))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (LatencyModel(OVERLAPPING.target, OVERLAPPING.drafts * 2), {"rate": 0.97, "cohorts": 2, "contention": 1.02}),
        (FLAT, {"rate": 0.6, "pads": True, "merge_tokens": 8.0}),
    ],
)
def test_a_step_that_takes_as_long_as_planned_teaches_no_correction(model, shapes):
    drafts = ("small", "large")
    made = shaped(model, drafts, **shapes)
    seen = view(16, drafts, context=np.array([900, *range(50, 65)]))
    state = made.start()
    for _ in range(40 if "cohorts" in shapes else 1):
        plan, state = made.plan(seen, state, 0.0, RNG)
    assert plan.shape is not None
    done = outcome(seen, plan, np.zeros(16, np.int64), shape=plan.shape)
    predicted, _ = made._predicted_s(done, seen)
    if "cohorts" not in shapes:  # whose parts run side by side
        assert predicted.sum() == pytest.approx(plan.predicted_s)
    names = ("verify", "overhead", "draft:small", "draft:large")
    state = made.observe(replace(done, parts_s=dict(zip(names, predicted.tolist(), strict=True))), state, 0.0)
    assert np.allclose(state.correction, 1.0)
