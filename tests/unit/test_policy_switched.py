from dataclasses import replace

import numpy as np
import pytest

from policy import (
    NO_DRAFT,
    DraftNodes,
    FixedLength,
    FreeChains,
    NoSpeculation,
    SwitchedPolicy,
    Switches,
)
from tests.fakes.policies import RNG, certain, outcome, planner, view


class Lever:
    """Switches that a test moves while the policy runs."""

    def __init__(self, **settings):
        self.now = Switches(**settings)

    def __call__(self):
        return self.now

    def set(self, **settings):
        self.now = replace(self.now, **settings)


def switched(lever, **config):
    return SwitchedPolicy(planner(**{**certain(0.9), **config}), lever)


def test_off_takes_effect_at_the_next_step_and_on_again_at_once():
    lever = Lever()
    p = switched(lever)
    lengths, state = [], p.start()
    for step, mode in enumerate(("on", "off", "off", "on")):
        lever.set(speculation=mode)
        plan, state = p.plan(view(2), state, float(step), RNG)
        lengths.append(plan.length.tolist())
        state = p.observe(outcome(view(2), plan, plan.length), state, float(step))
    assert lengths[1:3] == [[0, 0], [0, 0]]
    assert lengths[0] == lengths[3] != [0, 0]


@pytest.mark.parametrize(
    ("switches", "needs"),
    [
        (Switches(), False),
        (Switches(speculation="off"), False),
        (Switches(speculation="shadow"), True),
        (Switches(canary_share=0.5, fixed_draft="small", fixed_length=2), True),
    ],
)
def test_drafts_are_asked_where_another_than_a_resting_policy_may_use_them(switches, needs):
    for policy, resting in ((NoSpeculation(), True), (planner(), False)):
        switched = SwitchedPolicy(policy, lambda: switches)
        assert switched.needs_ceilings(np.arange(4), switched.start()) == (
            needs or not (resting or switches.speculation == "off")
        )


class Trims(FixedLength):
    """Has one node of each row verified."""

    def trim(self, view, plan, drafted, state):
        return np.ones(len(view), np.int64)


@pytest.mark.parametrize(
    ("mode", "control", "nodes"),
    [
        ("on", None, [1, 1]),
        ("on", [True, False], [3, 1]),
        ("shadow", None, [3, 3]),
        ("off", None, [0, 0]),
    ],
)
def test_only_the_planner_s_own_rows_are_trimmed_by_it(mode, control, nodes):
    lever = Lever(speculation=mode, fixed_draft="large", fixed_length=3)
    p = SwitchedPolicy(Trims("small", 2), lever)
    seen = view(2, control=None if control is None else np.array(control))
    plan, state = p.plan(seen, p.start(), 0.0, RNG)
    assert p.trim(seen, plan, DraftNodes(*np.zeros((4, 0))), state).tolist() == nodes


def test_off_learns_what_is_free():
    lever = Lever(speculation="off")
    p = switched(lever, acceptance=planner().config.acceptance)
    plan, state = p.plan(view(1), p.start(), 0.0, RNG)
    free = FreeChains(*np.array([[0], [1], [4], [4]]))
    after = p.observe(outcome(view(1), plan, 0, free=free), state, 0.0)
    assert after.inner.acceptance.estimates.draft_accepted.sum() == 4


def test_the_shadow_is_what_the_planner_would_have_done_and_only_the_fixed_choice_is_applied():
    for fixed in ({}, {"fixed_draft": "large", "fixed_length": 2}):
        lever = Lever(speculation="shadow", **fixed)
        p = switched(lever)
        plan, _ = p.plan(view(2), p.start(), 0.0, RNG)
        assert plan.length.tolist() == [fixed.get("fixed_length", 0)] * 2
        applied, _ = (alone := planner(**certain(0.9))).plan(view(2), alone.start(), 0.0, RNG)
        assert plan.shadow.length.tolist() == applied.length.tolist()
        assert plan.shadow.draft.tolist() == applied.draft.tolist()
        assert plan.shadow.predicted_s == pytest.approx(applied.predicted_s)


def test_in_the_shadow_a_draft_that_would_have_been_used_has_nothing_to_catch_up_on():
    p = switched(Lever(speculation="shadow"))
    far = view(1, catchup=np.full((1, 2), 400), ceiling=np.array([[8, 0]]))
    first, state = p.plan(far, p.start(), 0.0, RNG)
    state = p.observe(outcome(far, first, 0), state, 0.0)
    second, _ = p.plan(replace(far, catchup=far.catchup + 1), state, 0.1, RNG)
    assert first.shadow.length[0] > 0
    assert second.shadow.predicted_s < first.shadow.predicted_s - 0.7


def test_a_canary_mixes_the_fixed_choice_and_the_planner_s_in_one_batch():
    p = switched(Lever(canary_share=0.5, fixed_draft="large", fixed_length=3))
    control = np.array([True, False, True, False])
    plan, _ = p.plan(view(4, control=control), p.start(), 0.0, RNG)
    assert plan.length[control].tolist() == [3, 3]
    assert plan.draft[control].tolist() == [1, 1]
    assert (plan.length[~control] > 0).all()
    without = switched(Lever(canary_share=0.5))
    plan, _ = without.plan(view(4, control=control), without.start(), 0.0, RNG)
    assert plan.length[control].tolist() == [0, 0]
    assert plan.draft[control].tolist() == [NO_DRAFT, NO_DRAFT]


def test_a_policy_that_predicts_nothing_can_be_switched_too():
    p = SwitchedPolicy(
        NoSpeculation(), Lever(canary_share=0.0, fixed_draft="small", fixed_length=2)
    )
    plan, state = p.plan(view(2, control=np.array([True, True])), p.start(), 0.0, RNG)
    assert plan.length.tolist() == [2, 2]
    assert p.drift(p.observe(outcome(view(2), plan, 0), state, 0.0)) == {}


def test_the_cap_reaches_the_planner():
    free, _ = (p := switched(Lever())).plan(view(4), p.start(), 0.0, RNG)
    cap = 0.5 * (free.predicted_s + 1.0)
    capped, _ = (p := switched(Lever(inter_token_cap_s=cap))).plan(view(4), p.start(), 0.0, RNG)
    assert capped.predicted_s <= cap < free.predicted_s
    assert capped.length.any()


def test_the_arms_have_their_shares_and_a_larger_share_only_moves_requests_to_the_planner():
    fixed = {
        share: {r for r in range(4000) if Switches(canary_share=share).in_control(r)}
        for share in (0.0, 0.1, 0.5, 1.0)
    }
    assert len(fixed[0.0]) == 4000
    assert fixed[0.0] > fixed[0.1] > fixed[0.5] > fixed[1.0] == set()
    assert abs(len(fixed[0.1]) / 4000 - 0.9) < 0.02
    assert abs(len(fixed[0.5]) / 4000 - 0.5) < 0.03


def test_an_arm_has_a_name_only_while_the_planner_s_choice_is_applied():
    assert [Switches(speculation=mode).arm(True) for mode in ("on", "off", "shadow")] == [
        "fixed",
        "off",
        "shadow",
    ]
    assert Switches().arm(False) == "planner"
