import json
from dataclasses import replace

import numpy as np
import pytest

from policy import NoSpeculation, SwitchedPolicy, Switches
from policy.evidence import EVIDENCE_BINS
from policy.learned import LearnedError, without_times
from tests.fakes.policies import RNG, outcome, planner, taught, view


def test_what_is_saved_comes_back_in_another_process_s_time():
    p = planner()
    state = taught(p, start_s=5000.0)
    data = json.loads(json.dumps(p.save(state, 5059.0)))
    back = planner().load(data, 12.0, 0.0)
    for name in ("draft_accepted", "draft_reached", "draft_hazard"):
        known, kept = back.acceptance.estimates, state.acceptance.estimates
        assert np.allclose(getattr(known, name), getattr(kept, name))
    assert np.allclose(back.acceptance.estimates.variance, state.acceptance.estimates.variance)
    assert np.allclose(back.correction.factor, state.correction.factor)
    assert np.allclose(back.correction.applied, state.correction.log_factor)
    assert back.correction.applied.any()
    assert back.acceptance.slots == {}
    fresh = replace(
        state,
        acceptance=p.estimator.forget(state.acceptance, list(state.acceptance.slots)),
        goodput=0.0,
        trial_budget_s=0.0,
    )
    newcomer = view(3, request=np.arange(900, 903))
    assert (
        planner().plan(newcomer, back, 12.0, RNG)[0].length.tolist()
        == p.plan(newcomer, fresh, 5059.0, RNG)[0].length.tolist()
    )


def test_without_times_the_rest_comes_back():
    p = planner()
    state = taught(p)
    data = json.loads(json.dumps(without_times(p.save(state, 0.0))))
    back = planner().load(data, 0.0, 0.0)
    assert np.allclose(
        back.acceptance.estimates.draft_accepted, state.acceptance.estimates.draft_accepted
    )
    assert not np.allclose(state.correction.factor, 1.0)
    assert np.allclose(back.correction.factor, 1.0)
    assert not back.correction.log_factor.any()
    assert not back.correction.overhead_s.any()


def test_a_state_of_several_tenants_is_planned_from_after_a_restart():
    p, seen = planner(), view(3, request=np.arange(3), tenant=np.array([5, 6, 7]))
    state = p.start()
    for step in range(9):
        plan, state = p.plan(seen, state, float(step), RNG)
        state = p.observe(outcome(seen, plan, plan.length), state, float(step))
    state = planner().load(json.loads(json.dumps(p.save(state, 9.0))), 1.0, 0.0)
    later = view(2, request=np.array([11, 12]), tenant=np.array([6, 8]))  # one known, one new
    for step in range(3):
        plan, state = p.plan(later, state, 2.0 + step, RNG)
        state = p.observe(outcome(later, plan, plan.length), state, 2.0 + step)
    assert plan.length.all()


def test_what_verifying_takes_survives_a_restart():
    p = planner()
    state = taught(p)
    state.correction.verifying[:] = 0.3, 12.0
    back = p.load(p.save(state, 59.0), 7.0, 0.0)
    assert back.correction.verifying.tolist() == [0.3, 12.0]


def test_evidence_fades_while_nothing_runs():
    p = planner()
    state = taught(p)
    half_life = p.config.acceptance.half_life_s
    back = p.load(p.save(state, 59.0), 7.0, half_life)
    assert back.acceptance.estimates.draft_reached.sum() == pytest.approx(
        0.5 * state.acceptance.estimates.draft_reached.sum(), rel=0.01
    )
    assert p.load(
        p.save(state, 59.0), 7.0, -1e6
    ).acceptance.estimates.draft_reached.sum() == pytest.approx(
        state.acceptance.estimates.draft_reached.sum(), rel=0.01
    )


def test_nothing_is_saved_before_the_first_step_nor_by_a_policy_that_learns_nothing():
    assert planner().save(planner().start(), 1.0) == {}
    assert NoSpeculation().save(None, 1.0) == {}
    assert NoSpeculation().load({}, 1.0, 0.0) is None


def test_switches_do_not_stand_between_the_planner_and_its_data():
    p = SwitchedPolicy(planner(), Switches)
    data = p.save(taught(p), 59.0)
    assert p.save(p.load(data, 0.0, 0.0), 0.0)["drafts"] == data["drafts"]


def changed(data, path, value):
    """Learnt data with another value, or none, in a field."""
    *parts, last = path.split(".")
    inner = data
    for part in parts:
        inner = inner[int(part) if isinstance(inner, list) else part]
    if value is Ellipsis:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schema", 11, ["schema must be 15", "11"]),
        ("tenants.0.drafts.small.accepted", [1.0], ["tenants.0.drafts.small.accepted", "shape"]),
        ("tenants.0.drafts.small.accepted", "many", ["tenants.0.drafts.small.accepted", "many"]),
        ("tenants.0.drafts.small.accepted", ..., ["tenants.0.drafts.small.accepted is missing"]),
        (
            "tenants.0.drafts.small.reached",
            [[0.0] * 8] * EVIDENCE_BINS,
            ["tenants.0.drafts.small.accepted is out of range"],
        ),
        ("drafts.large.factor", 1000.0, ["drafts.large.factor", "1000"]),
        ("drafts.large.factor", float("nan"), ["drafts.large.factor", "nan"]),
        ("drafts.large.factor", 10**400, ["drafts.large.factor must be numbers", "1000"]),
        ("tenants.0.drafts.small.variance", None, ["tenants.0.drafts.small.variance", "nan"]),
        ("tenants.0.drafts.small.variance", 20.0, ["tenants.0.drafts.small.variance", "20"]),
        ("drafts.small", 3, ["drafts.small must be an object", "3"]),
        ("drafts", [], ["drafts must be an object", "[]"]),
        ("target.factor", [1.0, 1.0], ["target.factor", "shape"]),
        ("target.factor", ..., ["target.factor is missing"]),
        ("target.overhead_s", [0.1, -0.1], ["target.overhead_s", "-0.1"]),
        ("target.overhead_s", [0.1], ["target.overhead_s", "(2,)", "(1,)"]),
        ("target.seen", [-1.0] * 15, ["target.seen", "-1"]),
        ("target.log_factor", [0.8] * 15, ["target.log_factor", "0.8"]),
        ("target.log_factor", [0.1], ["target.log_factor", "shape"]),
        ("target.verifying", 1.5, ["target.verifying", "1.5"]),
        ("target.verifying", [0.1], ["target.verifying", "shape"]),
        ("target.verifying_steps", ..., ["target.verifying_steps is missing"]),
        ("target", ..., ["target is missing"]),
        ("age_s", -1.0, ["age_s", "-1"]),
        ("tenants.0.requests", float("inf"), ["tenants.0.requests", "inf"]),
        ("tenants", 3, ["tenants must be a list", "3"]),
        ("tenants.0.tenant", "salt", ["tenants", "salt"]),
        ("tenants.0.drafts", ..., ["tenants.0.drafts is missing"]),
        ("tenants.0.tenant", 1 << 63, ["tenants", "9223372036854775808"]),
    ],
)
def test_data_that_do_not_fit_are_refused_by_field_and_value(field, value, words):
    p = planner()
    with pytest.raises(LearnedError) as error:
        p.load(changed(p.save(taught(p, 60), 60.0), field, value), 0.0, 0.0)
    assert all(word in str(error.value) for word in words)
