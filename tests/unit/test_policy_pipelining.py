"""Cohorts: chosen where they pay, refused with the figures where they do not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import NO_DRAFT, AcceptanceConfig, AdaptivePlanner, LatencyModel, Plan, PlannerConfig
from policy.latency import Correction, LatencyCurve
from policy.pipelining import Pipelining, pipelined_s
from policy.problem import Choice
from tests.unit.test_policy_planner import RNG, UNSHAKEABLE, outcome, view

ONE = ("small",)


def line(fixed_s, token_s, context_s=0.0):
    return LatencyCurve(np.array([fixed_s, fixed_s + token_s]), token_s, 0.0, context_s)


WEIGHT_BOUND = LatencyModel(line(1.0, 0.0), (line(0.25, 0.0),))
ROW_BOUND = LatencyModel(line(0.0, 0.1), (line(0.0, 0.1),))
OVERLAPPING = LatencyModel(line(0.2, 0.01), (line(0.01, 0.005),))
"""Drafting for sixteen rows takes longer than reading the target's weights once more."""


def knowing(model, execution, rate=0.97, drafts=ONE):
    """A planner that knows the acceptance rate of chains and does not explore."""
    acceptance = AcceptanceConfig(
        prior_hazard=rate, prior_strength=UNSHAKEABLE, request_variance=1e-3
    )
    config = PlannerConfig(acceptance=acceptance, explore_share=0.0, k_max=4)
    return AdaptivePlanner(drafts, model, config, execution)


def planned(made, seen, steps=1):
    """The plan of a step after so many for the same batch."""
    state = made.start()
    for _ in range(steps):
        plan, state = made.plan(seen, state, 0.0, RNG)
    return plan


# -- the cut


def best_cut(latency, rows, length, contention, most=4, **changes):
    times = Correction.start(1).times(latency)
    choice = Choice(np.zeros(rows, np.int64), np.full(rows, length))
    return Pipelining(most, contention).best_cut(times, view(rows, ONE, **changes), choice)


def test_cohorts_pay_where_both_phases_scale_with_the_rows():
    found = best_cut(ROW_BOUND, 8, 1, 1.0)
    assert found.cut_s == pytest.approx(1.6)  # verifying alone: 16 tokens
    assert found.one_s == pytest.approx(2.4)
    assert found.cohort.tolist() == [0] * 4 + [1] * 4
    assert not found.why_not


@pytest.mark.parametrize(
    ("latency", "length", "contention"), [(WEIGHT_BOUND, 4, 1.0), (ROW_BOUND, 1, 1.5)]
)
def test_they_do_not_pay_where_weights_bind_or_the_phases_slow_each_other(
    latency, length, contention
):
    found = best_cut(latency, 8, length, contention)
    assert found.cut_s >= found.one_s - 1e-9
    assert found.why_not == "does not pay: 1.00"


@pytest.mark.parametrize(
    ("contention", "rows", "why"),
    [(None, 8, "contention is not measured"), (1.0, 1, "one row"), (1.0, 0, "one row")],
)
def test_without_the_means_there_is_no_cut_and_the_reason_says_why(contention, rows, why):
    found = best_cut(ROW_BOUND, rows, 1, contention)
    assert found.cohort is None
    assert found.why_not == why


@pytest.mark.parametrize("setting", [{"most": 0}, {"contention": 0.9}])
def test_a_setting_out_of_range_is_an_error_that_names_it(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got {value}"):
        Pipelining(**{"most": 2, "contention": 1.0} | setting)


def test_rows_that_are_not_ready_are_in_no_cohort():
    ready = np.array([True, False, True, True, True])
    assert best_cut(ROW_BOUND, 5, 1, 1.0, 2, ready=ready).cohort.tolist() == [0, -1, 0, 1, 1]


def test_prompt_tokens_are_verified_with_the_first_cohort():
    assert best_cut(ROW_BOUND, 8, 1, 1.0, 2, prefill_tokens=4).cut_s == pytest.approx(2.0)


def simulated_s(draft_s, verify_s, rounds=400):
    """Two resources that serve the cohorts in turn; a round's mean time after the start-up."""
    drafter = verifier = 0.0
    ready = [0.0] * len(draft_s)
    ends = []
    for _ in range(rounds):
        for c, (d, v) in enumerate(zip(draft_s, verify_s, strict=True)):
            drafter = max(drafter, ready[c]) + d
            verifier = max(verifier, drafter) + v
            ready[c] = verifier
        ends.append(verifier)
    return (ends[-1] - ends[rounds // 2 - 1]) / (rounds - rounds // 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_the_time_of_a_round_is_that_of_two_resources_serving_cohorts_in_turn(seed, cohorts):
    draft_s, verify_s = np.random.default_rng(seed).uniform(0.1, 2, (2, cohorts))
    assert pipelined_s(draft_s, verify_s) == pytest.approx(simulated_s(draft_s, verify_s), rel=0.02)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.floats(1.0, 2.0))
def test_two_cohorts_take_what_the_formula_says(seed, contention):
    """All rows alike: 2 max(D(B/2), V(B/2)) x contention against D + V."""
    rng = np.random.default_rng(seed)
    model = LatencyModel(line(*rng.uniform(0, 1, 2)), (line(*rng.uniform(0, 0.5, 2)),))
    found = best_cut(model, 8, 2, contention, 2)
    draft = {b: 2 * model.drafts[0].at(b) for b in (4, 8)}
    verify = {b: model.target.at(3 * b) for b in (4, 8)}
    assert found.cut_s == pytest.approx(2 * max(draft[4], verify[4]) * contention)
    assert found.one_s == pytest.approx(draft[8] + verify[8])
    assert bool(found.why_not) == (found.cut_s >= found.one_s)


# -- planned


def test_cohorts_are_planned_where_they_pay_and_shorten_the_predicted_step():
    one, two = (
        planned(knowing(OVERLAPPING, Pipelining(m, 1.0)), view(16, ONE), 40) for m in (1, 2)
    )
    assert one.flight is None
    assert two.flight.tolist() == [0] * 8 + [1] * 8
    assert two.predicted_s < one.predicted_s
    assert two.predicted_tokens == one.predicted_tokens
    assert one.length.any()


@pytest.mark.parametrize(
    ("model", "contention", "rows", "why"),
    [
        (LatencyModel(line(1.0, 0.001), (line(0.3, 0.0),)), 1.05, 8, "does not pay: 0."),
        (OVERLAPPING, None, 8, "contention is not measured"),
        (OVERLAPPING, 1.0, 1, "one row"),
    ],
)
def test_where_there_are_none_the_plan_says_why(model, contention, rows, why):
    plan = planned(knowing(model, Pipelining(2, contention)), view(rows, ONE))
    assert plan.flight is None
    assert plan.notes["why_not"]["cohorts"].startswith(why)


def test_beside_another_arm_s_rows_there_are_no_cohorts():
    canary = {"control": np.array([True, False]), "control_plan": Plan.nothing(2)}
    plan = planned(knowing(OVERLAPPING, Pipelining(2, 1.0)), view(2, ONE, **canary))
    assert plan.flight is None
    assert plan.notes["why_not"]["cohorts"] == "rows of another arm"


def test_cohorts_begin_when_they_would_have_saved_a_first_round_and_end_when_they_lost_as_much():
    made = knowing(OVERLAPPING, Pipelining(2, 1.0))
    state, running = made.start(), []
    for rows in [16] * 20 + [2] * 20 + [16, 2] * 10:
        plan, state = made.plan(view(rows, ONE), state, 0.0, RNG)
        running.append(plan.flight is not None)
    begun = running.index(True)
    assert 0 < begun < 20
    assert all(running[begun:21])
    ended = running.index(False, begun)
    assert 20 < ended < 40
    assert np.count_nonzero(np.diff(running[40:])) <= 1


# -- one cohort in flight


def half(rows, in_flight=(), **changes):
    seen = view(rows, ONE, **changes)
    seen.ready[list(in_flight)] = False
    seen.ceiling[list(in_flight)] = 0
    return seen


def begun():
    """A planner, its state once sixteen rows are in two cohorts, and the last plan."""
    made = knowing(OVERLAPPING, Pipelining(2, 1.0))
    state = made.start()
    for _ in range(40):
        plan, state = made.plan(half(16), state, 0.0, RNG)
    assert plan.flight.tolist() == [0] * 8 + [1] * 8
    return made, state, plan


def test_what_is_ready_is_one_cohort_and_its_plan_tells_of_its_share_of_a_step():
    made, state, first = begun()
    for in_flight in (range(8, 16), range(8), range(8, 16)):
        plan, state = made.plan(half(16, in_flight), state, 0.0, RNG)
        ready = np.setdiff1d(np.arange(16), list(in_flight))
        assert (plan.flight[ready] == 0).all()
        assert (plan.flight[list(in_flight)] == -1).all()
        assert plan.length[ready].all()
        assert not plan.length[list(in_flight)].any()
        assert 0.0 < plan.predicted_s < 0.6 * first.predicted_s
    assert sorted(state.memory.in_flight) == list(range(16))


def test_cohorts_of_which_little_is_left_end():
    made, state, _ = begun()
    cut = []
    for _ in range(60):
        plan, state = made.plan(half(2, [1]), state, 0.0, RNG)
        cut.append(plan.flight is not None)
    assert cut[0]
    assert not cut[-1]
    assert not state.memory.in_flight
    assert plan.notes["why_not"]["cohorts"]


def test_a_prompt_beside_a_cohort_in_flight_is_planned_for_though_no_row_is_ready():
    made, state, _ = begun()
    plan, _ = made.plan(half(16, range(16), prefill_tokens=32, prefilling=1), state, 0.0, RNG)
    assert not plan.length.any()


def test_an_unspeculating_cohort_goes_on_beside_one_that_speculates():
    made, state, _ = begun()
    seen = half(16, range(8, 16))
    seen.ceiling[:] = 0
    plan, state = made.plan(seen, state, 0.0, RNG)
    assert not plan.length.any()
    assert plan.flight.tolist() == [0] * 8 + [-1] * 8
    assert len(state.memory.in_flight) == 16


def test_a_step_that_takes_as_long_as_planned_teaches_no_correction():
    drafts = ("small", "large")
    model = LatencyModel(OVERLAPPING.target, OVERLAPPING.drafts * 2)
    made = knowing(model, Pipelining(2, 1.02), drafts=drafts)
    seen, state = view(16, drafts), made.start()
    for _ in range(40):
        plan, state = made.plan(seen, state, 0.0, RNG)
    assert plan.flight is not None
    done = outcome(seen, plan, np.zeros(16, np.int64), flight=plan.flight)
    predicted = made.predicted(Correction.start(2).times(model), done, seen).parts
    names = ("verify", "overhead", "draft:small", "draft:large")
    told = replace(done, parts_s=dict(zip(names, predicted.tolist(), strict=True)))
    assert np.allclose(made.observe(told, state, 0.0).correction.factor, 1.0)
    assert NO_DRAFT not in plan.draft
