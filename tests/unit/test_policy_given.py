"""Rows whose choice is another's, a cap on the step, and steps that another plans."""

from dataclasses import replace

import numpy as np
import pytest

from bench.micro.choices import step_problem
from policy import NO_DRAFT, FreeChains, LatencyModel, Plan
from policy.latency import Correction
from policy.loops.times import TimedStep, predict
from policy.problem import Choice, score
from tests.fakes.outcomes import outcome_of
from tests.fakes.policies import RNG, certain, latency, outcome, planner, view


def staircase():
    return latency(draft_s=(0.1, 0.3), token_s=0.07, free_tokens=3)


def with_context(model):
    """The model with a target that takes time for rows and for what it has cached."""
    more = {"row_s": 0.02, "context_s": 0.001, "node_context_s": 0.0005}
    return LatencyModel(replace(model.target, **more), model.drafts)


def canary(seen, draft, length):
    """The view with the rows of a canary's other arm: those whose length is not None."""
    control = np.array([k is not None for k in length])
    length = np.array([k or 0 for k in length])
    return replace(
        seen, control=control, control_plan=Plan(np.where(length > 0, draft, NO_DRAFT), length)
    )


def test_given_rows_cost_what_they_would_in_one_joint_choice_and_as_the_step_is_predicted():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(2, 6))
        seen = view(
            n,
            k=4,
            context=rng.integers(10, 300, n),
            catchup=rng.integers(1, 3, (n, 2)),
            prefill_tokens=int(rng.integers(0, 9)),
        )
        hazard = rng.uniform(0.2, 0.9, (4, 2, n))
        draft, length = rng.integers(0, 2, n), rng.integers(0, 5, n)
        everyone = Choice(np.where(length > 0, draft, NO_DRAFT), length)
        own = rng.random(n) < 0.5
        mine = np.flatnonzero(own)
        correction = Correction.start(2)
        correction.verifying[0] = np.log(1.4)
        times = correction.times(with_context(staircase()))
        joint = score(step_problem(times, seen, hazard, 4, 16.0), everyone)
        rows, parts = np.arange(n), np.empty(4)
        columns = rows, everyone.draft, length, length, seen.context, seen.catchup
        predict(times, TimedStep(*columns, seen.prefill_tokens, *[0] * 4), parts)
        assert parts.sum() == pytest.approx(joint.step_s)
        seen = canary(
            seen, everyone.draft, [None if k else int(n) for k, n in zip(own, length, strict=True)]
        )
        problem = step_problem(times, seen, hazard, 4, 16.0)
        partial = score(problem, Choice(everyone.draft[mine], length[mine]))
        assert partial.step_s == pytest.approx(joint.step_s)
        assert partial.value == pytest.approx(joint.value)


def test_the_planner_leaves_given_rows_alone_and_predicts_their_step():
    p = planner(staircase(), **certain(0.8))
    seen = view(4, k=4)
    plan, _ = p.plan(canary(seen, 0, [3, None, 0, None]), p.start(), 0.0, RNG)
    assert plan.length[[0, 2]].tolist() == [0, 0]
    alone, _ = p.plan(canary(seen, 0, [0, None, 0, None]), p.start(), 0.0, RNG)
    assert plan.predicted_s > alone.predicted_s
    assert plan.predicted_tokens == pytest.approx(
        alone.predicted_tokens + 0.8 + 0.8**2 + 0.8**3, rel=0.3
    )


def test_a_draft_that_runs_for_given_rows_anyway_is_cheaper_to_join():
    p = planner(latency(draft_s=(0.25, 0.26), token_s=0.0), **certain(0.7))
    seen = view(3, k=8, ceiling=np.array([[8, 8], [8, 8], [8, 0]]))
    apart, _ = p.plan(canary(seen, 0, [0, 0, None]), p.start(), 0.0, RNG)
    joined, _ = p.plan(canary(seen, 0, [8, 8, None]), p.start(), 0.0, RNG)
    assert joined.length[2] > apart.length[2]


def test_a_batch_of_nothing_but_given_rows_is_planned():
    p = planner(**certain(0.7))
    plan, state = p.plan(canary(view(5), 1, [2, 2, 0, 0, 3]), p.start(), 0.0, RNG)
    assert plan.length.tolist() == [0] * 5
    assert plan.predicted_s > 1.0
    assert state.goodput > 0


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("explore", [0.0, 0.5])
def test_no_planned_step_exceeds_the_cap_nor_stays_far_below_it_when_more_pays(rows, explore):
    p = planner(latency(token_s=0.02, free_tokens=1), **certain(0.9) | {"explore_share": explore})
    free = p.plan(view(rows), p.start(), 0.0, RNG)[0].predicted_s
    plain = p.plan(view(rows, k=0), p.start(), 0.0, RNG)[0].predicted_s
    assert free > 1.5 * plain
    for cap in (0.0, plain, 0.5 * (plain + free), free, np.inf):
        state = p.start()
        for step in range(30):
            seen = view(rows, cap_s=float(cap))
            plan, state = p.plan(seen, state, float(step), RNG)
            assert plan.predicted_s <= max(cap, plain) * (1 + 1e-6)
            state = p.observe(
                outcome(seen, plan, np.full(rows, 8), plan.predicted_s), state, float(step)
            )
        assert plan.length.any() == (cap > plain)


def test_under_a_cap_a_change_of_width_makes_no_planned_step_longer():
    p = planner(latency(token_s=0.05, free_tokens=1), **certain(0.9))
    width = {"pass_tokens": 4, "change_tokens": 8}
    plain = p.plan(view(4, k=0, **width), p.start(), 0.0, RNG)[0].predicted_s
    free = p.plan(view(4, **width), p.start(), 0.0, RNG)[0]
    assert free.predicted_s > 1.5 * plain
    for cap in np.linspace(plain, free.predicted_s, 9):
        plan, _ = p.plan(view(4, cap_s=float(cap), **width), p.start(), 0.0, RNG)
        assert plan.predicted_s <= cap * (1 + 1e-6)
    assert plan.length.tolist() == free.length.tolist()


def test_a_step_that_another_plans_teaches_times_and_acceptance():
    p = planner(explore_share=0.0)
    seen = view(2)
    plan, state = p.plan(seen, p.start(), 0.0, RNG)
    state = p.observe(outcome(seen, plan, np.full(2, 8)), state, 0.0)
    nothing = np.zeros(2, np.int64)
    plain = outcome_of(
        seen.request, nothing - 1, nothing, nothing, nothing + 1, nothing, nothing,
        2.0, {"verify": 2.0}, view=seen, free=FreeChains(*np.array([[0], [1], [3], [4]])),
    )  # fmt: skip
    after = p.observe(plain, state, 0.1)
    assert p.drift(after)["verify"] > p.drift(state)["verify"]
    assert (
        after.acceptance.estimates.draft_reached[1].sum()
        > 3.5
        > state.acceptance.estimates.draft_reached[1].sum()
    )
