"""The search against an oracle that shares no scoring code with it, and what holds of every
plan.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.micro.choices import best_choice
from bench.micro.oracle import (
    best_by_enumeration,
    best_by_rows,
    drift,
    random_instance,
    sizes,
    with_cap,
    with_given,
)
from policy import AcceptanceConfig, AdaptivePlanner, NoSpeculation, PlannerConfig
from tests.fakes.outcomes import outcome_of

RNG = np.random.default_rng(0)
SEEDS = st.integers(0, 2**32)


def options(choice):
    return tuple(zip(choice.draft.tolist(), choice.length.tolist(), strict=True))


def objective(instance, choice):
    return instance.objective((*options(choice), *instance.fixed_choices))


def loss(instance, best):
    """The choice's loss against the best one, as a share of what the step's time is worth."""
    choice, result = best_choice(instance.problem(), instance.price)
    found = objective(instance, choice)
    assert result.objective(instance.price) == pytest.approx(found, rel=1e-9, abs=1e-9)
    lost = best(instance) - found
    assert lost > -1e-9
    return lost / (instance.price * result.charged_s)


def test_up_to_three_rows_it_nearly_always_finds_the_best_choice_there_is():
    """With rows already decided and under caps too; for a single row always."""
    rng, losses = np.random.default_rng(1), []
    for _ in range(300):
        instance = random_instance(rng, *sizes(rng))
        if len(instance.view) > 1 and rng.random() < 0.25:
            instance = with_given(instance, rng)
        if rng.random() < 0.25:
            instance = with_cap(instance, rng)
        losses.append(loss(instance, best_by_enumeration))
        assert instance.rows > 1 or losses[-1] < 1e-9
    assert np.mean(losses) < 0.005
    assert np.mean(np.array(losses) < 1e-9) > 0.9


def test_the_two_oracles_agree():
    rng = np.random.default_rng(2)
    for _ in range(60):
        instance = random_instance(rng, *sizes(rng))
        assert best_by_rows(instance) == pytest.approx(
            best_by_enumeration(instance), rel=1e-9, abs=1e-9
        )


@pytest.mark.medium
@pytest.mark.parametrize(("rows", "drafts", "k_max"), [(4, 3, 3), (5, 2, 3), (6, 2, 3), (8, 2, 2)])
def test_from_four_rows_to_eight_it_loses_little(rows, drafts, k_max):
    rng = np.random.default_rng(3)
    losses = [loss(random_instance(rng, rows, drafts, k_max), best_by_rows) for _ in range(30)]
    assert np.mean(losses) < 0.005
    assert max(losses) < 0.06


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 20), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_over_many_steps_plans_keep_to_what_is_allowed_repeat_and_follow_the_requests_in_any_order(
    seed, rows, drafts, k_max, alike
):
    """Two planners see the same batch, the other's rows in another order in every step; a third
    sees what the first does.
    """
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, rows, drafts, k_max)
    if alike:
        columns = "context", "remaining", "ceiling", "catchup"
        first_row = {
            name: getattr(instance.view, name)[:1].repeat(rows, axis=0) for name in columns
        }
        instance = replace(instance, view=replace(instance.view, **first_row))
    planner = AdaptivePlanner(
        instance.view.drafts, instance.latency, PlannerConfig(k_max=k_max, explore_share=0.0)
    )
    first = second = third = planner.start()
    for step in range(12):
        view, order = instance.view, rng.permutation(rows)
        plan, first = planner.plan(view, first, 0.1 * step, RNG)
        other, second = planner.plan(_rows(view, order), second, 0.1 * step, RNG)
        again, third = planner.plan(view, third, 0.1 * step, RNG)
        assert options(again) == options(plan)
        assert options(other) == tuple(options(plan)[i] for i in order)
        assert all(
            k <= (instance.longest(row, d) if k else 0) for row, (d, k) in enumerate(options(plan))
        )
        accepted = rng.binomial(plan.length, 0.7)
        done = view.request, plan.draft, plan.length, accepted, accepted + 1
        outcome = outcome_of(*done, plan.length, plan.length, plan.predicted_s, view=view)
        first, third = (planner.observe(outcome, state, 0.1 * step) for state in (first, third))
        second = planner.observe(_turns(outcome, order), second, 0.1 * step)
        instance = drift(instance, options(plan), rng)


def _rows(view, order):
    names = ("request", "context", "remaining", "ceiling", "catchup")
    return replace(view, **{name: getattr(view, name)[order] for name in names})


def _turns(outcome, order):
    names = ("request", "draft", "length", "accepted", "emitted", "scored", "verified")
    rows = replace(outcome.rows, **{name: getattr(outcome.rows, name)[order] for name in names})
    return replace(outcome, rows=rows)


@settings(max_examples=100)
@given(SEEDS, st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_no_choice_exceeds_a_ceiling_or_the_cap_nor_is_worse_than_none(
    seed, rows, drafts, k_max, capped
):
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, rows, drafts, k_max)
    cap_s = float(rng.uniform(0.5, 3.0)) if capped else np.inf
    instance = replace(instance, view=replace(instance.view, cap_s=cap_s))
    choice, result = best_choice(instance.problem(), instance.price)
    assert (
        choice.length
        <= [instance.longest(i, d) if d >= 0 else 0 for i, d in enumerate(choice.draft.tolist())]
    ).all()
    assert objective(instance, choice) > -np.inf  # the oracle's word for a broken cap
    assert result.step_s <= max(cap_s, instance.verify_s[0]) * (1 + 1e-6)
    nothing = instance.objective(((-1, 0),) * rows)
    assert objective(instance, choice) >= nothing - 1e-9


@settings(max_examples=60)
@given(SEEDS, st.integers(2, 40), st.integers(1, 3), st.integers(1, 6))
def test_permuting_the_requests_permutes_the_plan(seed, rows, drafts, k_max):
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, rows, drafts, k_max)
    order, view = rng.permutation(rows), instance.view
    permuted = _rows(view, order)
    choice, result = best_choice(instance.problem(), instance.price)
    other, again = best_choice(
        replace(instance, view=permuted, hazard=instance.hazard[order]).problem(), instance.price
    )
    assert again.objective(instance.price) == pytest.approx(
        result.objective(instance.price), rel=1e-9
    )
    assert other.length.tolist() == choice.length[order].tolist()
    assert other.draft.tolist() == choice.draft[order].tolist()


@pytest.mark.slow
@settings(max_examples=6)
@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_after_any_history_every_draft_comes_back(seed, rows, drafts):
    """For a number of steps nothing at all is accepted, or some of it; then new requests come to a
    fleet that has learnt that.
    """
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, rows, drafts, 4)
    latency = replace(
        instance.latency,
        drafts=tuple(
            replace(c, base_s=np.full(2, 0.02), slope_s=0.0) for c in instance.latency.drafts
        ),
    )
    config = PlannerConfig(
        k_max=4,
        explore_share=0.05,
        acceptance=AcceptanceConfig(draft_memory_rows=100.0, request_memory_steps=30.0),
    )
    planner = AdaptivePlanner(instance.view.drafts, latency, config)
    state, used, accepts = planner.start(), set(), float(rng.choice([0.0, 0.3]))
    base = replace(
        instance.view,
        cap_s=np.inf,
        ceiling=np.full((rows, drafts), 4),
        catchup=np.ones((rows, drafts), np.int64),
    )
    for step in range(1000):
        view = replace(
            base, request=np.arange(rows) + rows * (step // 40), remaining=np.full(rows, 100)
        )
        plan, state = planner.plan(view, state, float(step), RNG)
        if step > 500:
            used |= set(plan.draft[plan.length > 0].tolist())
        accepted = rng.binomial(plan.length, accepts)
        done = view.request, plan.draft, plan.length, accepted, accepted + 1
        outcome = outcome_of(*done, plan.length, plan.length, plan.predicted_s, view=view)
        finished = view.request[: rows * (step % 40 == 39)]
        state = planner.observe(replace(outcome, finished=finished), state, float(step))
    assert used == set(range(drafts))


def test_a_plan_is_never_predicted_to_be_worse_than_no_speculation():
    rng = np.random.default_rng(5)
    for _ in range(100):
        rows, drafts = int(rng.integers(1, 20)), int(rng.integers(1, 4))
        instance = random_instance(rng, rows, drafts, 6)
        planner = AdaptivePlanner(
            instance.view.drafts, instance.latency, PlannerConfig(k_max=6, explore_share=0.0)
        )
        plan, _ = planner.plan(instance.view, planner.start(), 0.0, RNG)
        none, _ = NoSpeculation().plan(instance.view, None, 0.0, RNG)
        assert plan.notes["gain"] >= 1 - 1e-9
        assert plan.predicted_tokens >= len(none.length) - 1e-9
