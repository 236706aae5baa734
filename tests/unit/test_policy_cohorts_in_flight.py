"""The planner while one cohort is in flight: it goes on where the whole batch gains by it, and else has everything waited for."""

import numpy as np

from policy.shapes import COHORTS
from tests.unit.test_policy_shaped import ONE, OVERLAPPING, RNG, shaped
from tests.unit.test_policy_shaped import view as whole_view


def view(rows, flying=()):
    seen = whole_view(rows, ONE)
    seen.ready[list(flying)] = False
    seen.ceiling[list(flying)] = 0
    return seen


def begun(contention=1.0):
    """A planner and its state once sixteen rows are in two cohorts, and the plan of the last step."""
    made = shaped(OVERLAPPING, rate=0.97, cohorts=2, contention=contention)
    state = made.start()
    for _ in range(40):
        plan, state = made.plan(view(16), state, 0.0, RNG)
    assert plan.shape.cohort.tolist() == [0] * 8 + [1] * 8
    return made, state, plan


def test_what_is_ready_is_one_cohort_and_its_plan_tells_of_its_share_of_a_step():
    made, state, first = begun()
    for flying in (range(8, 16), range(8), range(8, 16)):
        plan, state = made.plan(view(16, flying), state, 0.0, RNG)
        ready = np.setdiff1d(np.arange(16), list(flying))
        assert (plan.shape.cohort[ready] == 0).all()
        assert (plan.shape.cohort[list(flying)] == -1).all()
        assert plan.length[ready].all()
        assert not plan.length[list(flying)].any()
        assert 0.0 < plan.predicted_s < 0.6 * first.predicted_s
    assert sorted(state.flying) == sorted(view(16).request.tolist())


def test_cohorts_of_which_little_is_left_end():
    made, state, _ = begun()
    cut = []
    for _ in range(60):
        plan, state = made.plan(view(2, [1]), state, 0.0, RNG)
        cut.append(plan.shape is not None)
    assert cut[0]
    assert not cut[-1]
    assert state.flying is None
    assert plan.notes["why_not"][COHORTS]


def test_a_prompt_beside_a_cohort_in_flight_is_planned_for_though_no_row_is_ready():
    made, state, _ = begun()
    seen = view(16, range(16))
    seen.prefill_tokens, seen.prefilling = 32, 1
    plan, _ = made.plan(seen, state, 0.0, RNG)
    assert not plan.length.any()


def test_an_unspeculating_cohort_goes_on_beside_one_that_speculates():
    made, state, _ = begun()
    seen = view(16, range(8, 16))
    seen.ceiling[:] = 0
    plan, state = made.plan(seen, state, 0.0, RNG)
    assert not plan.length.any()
    assert plan.shape.cohort.tolist() == [0] * 8 + [-1] * 8
    assert len(state.flying) == 16
