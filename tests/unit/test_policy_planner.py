from dataclasses import replace

import numpy as np
import pytest

from policy import (
    NO_DRAFT,
    AcceptanceConfig,
    AdaptivePlanner,
    FixedLength,
    FreeChains,
    LatencyModel,
    LatencyTable,
    NoSpeculation,
    Plan,
    PlannerConfig,
)
from tests.fakes.policies import DRAFTS, RNG, certain, latency, outcome, planner, view

# -- the seam


def test_lengths_keep_to_ceiling_and_remaining():
    ceiling = np.array([[0, 0], [3, 0], [8, 8]])
    seen = view(
        3,
        ceiling=ceiling,
        remaining=np.array([50, 50, 2]),
    )
    plan, _ = (p := planner(latency((0.001, 0.001)), **certain(0.99))).plan(
        seen, p.start(), 0.0, RNG
    )
    assert plan.length.tolist() == [0, 3, 1]
    assert plan.draft[:2].tolist() == [NO_DRAFT, 0]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_step_in_which_nothing_can_draft_is_planned(rows):
    p = planner()
    plan, state = p.plan(view(rows, k=0, prefill_tokens=32), p.start(), 0.0, RNG)
    assert plan.length.tolist() == [0] * rows
    assert plan.predicted_s > 0
    assert p.plan(view(rows, k=0), state, 0.0, RNG)[0].length.tolist() == [0] * rows


def test_another_list_of_drafts_is_refused():
    p = planner()
    with pytest.raises(ValueError, match="medium"):
        p.plan(view(drafts=("small", "medium")), p.start(), 0.0, RNG)
    with pytest.raises(ValueError, match="got 2"):
        AdaptivePlanner(("small",), latency())


@pytest.mark.parametrize(
    ("name", "value"),
    [("k_max", -1), ("explore_share", 1.0), ("optimism", 0.0), ("switch_horizon_steps", -2.0)],
)
def test_a_setting_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        PlannerConfig(**{name: value})


def test_the_same_view_and_state_give_the_same_plan_whatever_the_generator():
    p = planner()
    plans = [p.plan(view(5), p.start(), 0.0, np.random.default_rng(seed))[0] for seed in (1, 2)]
    assert plans[0].length.tolist() == plans[1].length.tolist()
    assert plans[0].draft.tolist() == plans[1].draft.tolist()


def test_the_plan_says_what_it_expects():
    p = planner(latency((0.1,)), drafts=("small",), **certain(0.5, k_max=1))
    plan, _ = p.plan(view(1, drafts=("small",)), p.start(), 0.0, RNG)
    assert plan.length.tolist() == [1]
    assert plan.predicted_s == pytest.approx(1.1)
    assert plan.predicted_tokens == pytest.approx(1.5)
    assert plan.price == pytest.approx(1.5 / 1.1, rel=0.02)


# -- what it decides


H100_8B = {
    "kv": 4.85907942e-5,
    "token": 1.84383603e-2,
    "row": -4.33144783e-2,
    "fixed": 6.938699571857084,
}
EAGLE = {
    "kv": 2.89700974e-6,
    "token": 4.38694070e-5,
    "k": 0.452175870,
    "row": 5.52805909e-3,
    "fixed": 0.4471109584,
}
CONTEXT = 512


def h100(rows, k_max):
    """SmartSpec's public coefficients for an 8B on an H100 with an EAGLE draft, 5 % overhead, as
    tables for one batch size (seconds).
    """
    kv = rows * CONTEXT

    def target_s(tokens):
        plain = (
            H100_8B["kv"] * kv
            + H100_8B["token"] * tokens
            + H100_8B["row"] * rows
            + H100_8B["fixed"]
        )
        return plain * (1.05 if tokens > rows else 1.0) / 1e3

    grid = [rows, *(rows + m for m in range(1, rows * k_max + 1))]
    forward_s = EAGLE["k"] / 1e3
    once_s = (EAGLE["kv"] * kv + EAGLE["token"] * rows + EAGLE["row"] * rows + EAGLE["fixed"]) / 1e3
    target = LatencyTable.synthetic(
        "target",
        {t: target_s(t) for t in grid if t == rows or (t - rows) % rows == 0 or t == rows + 1},
    )
    return LatencyModel.from_tables(
        target, {"eagle": LatencyTable.synthetic("eagle", {1: forward_s})}, speculation_s=once_s
    )


RATES = 0.5, 0.7, 0.9
CROSSOVER = {1: (3, 5, 10), 8: (3, 5, 10), 32: (2, 3, 8), 64: (1, 3, 6), 128: (0, 2, 5)}


@pytest.mark.parametrize(
    ("rows", "rate", "best"),
    [(rows, rate, k) for rows, ks in CROSSOVER.items() for rate, k in zip(RATES, ks, strict=True)]
    + [(256, 0.5, 0), (256, 0.9, 0)],
)
def test_the_published_crossover_is_reproduced(rows, rate, best):
    p = AdaptivePlanner(("eagle",), h100(rows, 10), PlannerConfig(**certain(rate, k_max=10)))
    plan, _ = p.plan(view(rows, drafts=("eagle",), k=10), p.start(), 0.0, RNG)
    assert plan.length.tolist() == [best] * rows


def test_speculation_falls_to_nothing_as_the_batch_grows():
    p = planner(**certain(0.6))
    lengths = [p.plan(view(rows), p.start(), 0.0, RNG)[0].length.mean() for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 2
    assert lengths[-1] == 0


def test_two_workloads_in_one_batch_get_their_own_lengths():
    p = planner(explore_share=0.0)
    seen, state = view(4), p.start()
    for _ in range(60):
        plan, state = p.plan(seen, state, 0.0, RNG)
        state = p.observe(
            outcome(
                seen,
                replace(plan, draft=np.zeros(4, int), length=np.full(4, 3)),
                np.array([3, 3, 0, 0]),
            ),
            state,
            0.0,
        )
    plan, _ = p.plan(seen, state, 0.0, RNG)
    assert plan.length[:2].min() >= 3
    assert plan.length[2:].tolist() == [0, 0]


def test_those_in_prefill_make_time_dearer_as_they_wait_for_the_step_too():
    p = planner(**certain(0.7))
    alone, few, many = (p.plan(view(4, prefilling=n), p.start(), 0.0, RNG)[0] for n in (0, 4, 40))
    for plan, waiting in (alone, 1), (few, 2), (many, 11):
        assert plan.price == pytest.approx(
            waiting * plan.predicted_tokens / plan.predicted_s, rel=0.03
        )
    assert alone.length.sum() > few.length.sum() > many.length.sum() == 0


def test_the_price_is_that_of_a_step_without_its_prefill_however_little_of_it_is_realised():
    """A token brings its part of the prompts with it, so the time of prefill is no reason to
    speculate longer.
    """
    p = planner(latency(free_tokens=1), **certain(0.7))
    state, alone = p.start(), p.plan(view(4), p.start(), 0.0, RNG)[0]
    for _ in range(300):
        seen = view(4, prefill_tokens=256)
        plan, state = p.plan(seen, state, 0.0, RNG)
        state = p.observe(
            outcome(seen, plan, np.zeros(4, int), plan.predicted_s, prefill_tokens=256), state, 0.0
        )
    after, _ = p.plan(view(4, request=np.arange(4, 8)), state, 0.0, RNG)
    assert after.price == pytest.approx(alone.price, rel=0.05)


def test_a_node_pays_for_the_context_that_it_reads():
    model = latency((0.001, 0.001))
    reading = replace(model, target=replace(model.target, node_context_s=2e-5))
    lengths = []
    for context in (10, 1000):
        p, seen = planner(reading, **certain(0.8)), view(4, context=np.full(4, context))
        lengths.append(p.plan(seen, p.start(), 0.0, RNG)[0].length.sum())
    assert lengths[0] > lengths[1] > 0


@pytest.mark.parametrize("hazard", [0.3, 0.6, 0.9])
def test_what_the_trim_would_not_verify_for_the_width_of_the_pass_is_not_drafted(hazard):
    """After a plain step, 16 rows wide, a wider pass costs as much as many tokens more."""
    p = planner(latency((0.01, 0.02), token_s=0.02, free_tokens=1), **certain(hazard))
    state = p.start()

    def planned(change_tokens, pass_tokens=16):
        seen = view(16, pass_tokens=pass_tokens, change_tokens=change_tokens)
        return p.plan(seen, state, 0.0, RNG)[0]

    assert planned(0).length.sum() > 0
    assert planned(10_000).length.sum() == 0
    lengths = [int(planned(tokens).length.sum()) for tokens in (0, 20, 40, 80, 160, 320, 640)]
    drafted = [total for total in lengths if total]
    assert drafted, "a dear change was never worth it"
    assert lengths[len(drafted) :] == [0] * (len(lengths) - len(drafted))
    as_wide = planned(10_000, pass_tokens=40)
    assert as_wide.length.sum() == 24  # the room that the last pass leaves, which costs nothing
    assert as_wide.predicted_s < planned(10_000, pass_tokens=15).predicted_s


@pytest.mark.parametrize("pass_tokens", [16, 19, 43, 300])
def test_no_width_of_the_last_pass_keeps_a_batch_from_what_is_best_for_long(pass_tokens):
    """Passes are as wide as tiles of 16 tokens; a change of width takes as long as one tile."""
    tiles = {t: 0.03 + 0.01 * ((t - 1) // 16) for t in (1, 16, 17, 32, 33, 48, 49, 64, 65, 80, 512)}
    draft = LatencyTable.synthetic("d0", {1: 1e-4, 128: 1e-4})
    model = LatencyModel.from_tables(LatencyTable.synthetic("target", tiles), {"d0": draft})
    for hazard, drafts in ((0.25, False), (0.9, True)):
        p = planner(model, ["d0"], **certain(hazard))
        seen = view(16, drafts=("d0",), pass_tokens=pass_tokens, change_tokens=16)
        plan = p.plan(seen, p.start(), 0.0, RNG)[0]
        assert (plan.length.sum() > 0) == drafts


def test_the_first_steps_of_an_octave_of_rows_are_plain_until_these_are_known():
    p = planner(**certain(0.9), first_plain_steps=2)
    state = p.start()

    def drafted(rows, state, **changes):
        seen = view(rows, **changes)
        plan, state = p.plan(seen, state, 0.0, RNG)
        return plan.length.sum() > 0, state

    is_drafted, _ = drafted(4, state, prefill_tokens=32)
    assert is_drafted, "steps with prompts teach nothing of it"
    for rows, expected in ((4, False), (5, False), (7, True), (8, False), (9, False), (8, True)):
        is_drafted, state = drafted(rows, state)
        assert is_drafted is np.bool_(expected)
    known = p.start()
    known.correction.octave_steps[2] = 2.0
    assert drafted(4, known)[0]


@pytest.mark.parametrize("pass_tokens", [16, 300])
def test_a_plan_promises_the_whole_change_of_width(pass_tokens):
    p = planner(latency(), **certain(0.1))
    seen = view(16, k=0, pass_tokens=pass_tokens, change_tokens=8)
    usual_s = p.plan(replace(seen, change_tokens=0), p.start(), 0.0, RNG)[0].predicted_s
    change_s = 0.0 if pass_tokens == 16 else 8 * 0.02
    plan = p.plan(seen, p.start(), 0.0, RNG)[0]
    assert plan.predicted_s == pytest.approx(usual_s + change_s, rel=1e-3)


def test_plain_steps_teach_what_they_take_one_by_one_and_later_now_and_then():
    p, seen = planner(latency()), view(4, k=0)
    state, learnt = p.start(), []
    for step in range(140):
        plan, state = p.plan(seen, state, 0.0, RNG)
        before = state.correction
        done = outcome(seen, plan, [0] * 4, 3.1, parts_s={"verify": 3.0, "overhead": 0.1})
        state = p.observe(done, state, 0.0)
        if state.correction is not before:
            learnt.append(step)
    assert learnt[:9] == [*range(9)]
    assert 6 <= len(learnt[9:]) <= 10


def test_a_look_up_that_is_scored_in_a_plain_step_makes_only_that_step_be_learnt():
    p, seen = planner(latency()), view(4, k=0)
    state, learnt = p.start(), []
    for step in range(80):
        plan, state = p.plan(seen, state, 0.0, RNG)
        before = state.correction
        done = outcome(seen, plan, [0] * 4, 3.1, parts_s={"verify": 3.0, "overhead": 0.1})
        if step % 8 == 1:
            done = replace(done, free=FreeChains(*(np.array([n]) for n in (0, 0, 1, 2, 0))))
        state = p.observe(done, state, 0.0)
        if state.correction is not before:
            learnt.append(step)
    assert {*range(17, 80, 8)} <= {*learnt}
    assert len([step for step in learnt if step >= 16]) <= 16


def test_prompts_teach_nothing_of_the_overhead_of_plans():
    p, seen = planner(latency()), view(4, k=0)
    plan, state = p.plan(seen, p.start(), 0.0, RNG)
    done = outcome(seen, plan, [0] * 4, 3.5, parts_s={"verify": 3.0, "overhead": 0.5})
    overhead_s = [
        p.observe(replace(done, prefill_tokens=tokens), state, 0.0).correction.overhead_s[0]
        for tokens in (64, 0)
    ]
    assert overhead_s == [0.0, 0.5]


def test_prefill_in_the_step_does_not_lengthen_chains():
    """Prefill makes the step long; V / T of the step alone would then speculate more."""
    p = planner(latency(free_tokens=1), **certain(0.7))
    alone, mixed = (
        p.plan(view(4, prefill_tokens=tokens), p.start(), 0.0, RNG)[0] for tokens in (0, 256)
    )
    assert mixed.predicted_s > alone.predicted_s + 4
    assert mixed.length.sum() <= alone.length.sum()


def test_a_long_catch_up_is_not_worth_it_for_a_request_that_is_nearly_over():
    p = planner(latency((0.3, 9.0)), **certain(0.8))
    lag = np.full((1, 2), 2000)
    assert (
        p.plan(view(1, catchup=lag, remaining=np.array([500])), p.start(), 0.0, RNG)[0].length[0]
        > 0
    )
    assert (
        p.plan(view(1, catchup=lag, remaining=np.array([4])), p.start(), 0.0, RNG)[0].length[0] == 0
    )


# -- what it learns


def test_measured_times_correct_the_tables_and_the_drift_is_exposed():
    p = planner(latency((0.1,)), drafts=("small",), **certain(0.7))
    state, seen = p.start(), view(1, drafts=("small",))
    before, _ = p.plan(seen, state, 0.0, RNG)
    for _ in range(200):
        plan, state = p.plan(seen, state, 0.0, RNG)
        parts = {"verify": 1.0, "draft:small": 0.4 * int(plan.length[0])}
        done = outcome(seen, plan, plan.length, parts_s=parts)
        done.rows.scored = np.zeros(1, np.int64)
        state = p.observe(done, state, 0.0)
    parts = {"verify": 1.0, "draft:small": 4.0, "verifying": 1.0}
    assert p.drift(state) == pytest.approx(parts, rel=0.02)
    after, _ = p.plan(seen, state, 0.0, RNG)
    assert 0 < after.length[0] < before.length[0]


def test_a_step_timed_only_as_a_whole_corrects_all_its_parts():
    p = planner(**certain(0.7))
    state, seen = p.start(), view(1)
    for _ in range(200):
        plan, state = p.plan(seen, state, 0.0, RNG)
        state = p.observe(
            outcome(seen, plan, plan.length, measured_s=2 * (1.0 + 0.1 * int(plan.length[0]))),
            state,
            0.0,
        )
    parts = {"verify": 2.0, "draft:small": 2.0, "draft:large": 1.0, "verifying": 1.0}
    assert p.drift(state) == pytest.approx(parts, rel=0.02)


def test_longer_passes_that_verify_are_exposed_by_themselves():
    p = planner(latency((0.1,)), drafts=("small",), **certain(0.7))
    state, seen, rng = p.start(), view(1, drafts=("small",)), np.random.default_rng(1)
    for step in range(300):
        plan, state = p.plan(seen, state, 0.0, RNG)
        if step % 2:
            plan = Plan.nothing(1)
        verify_s = (1.5 if plan.length[0] else 1.0) * np.exp(0.02 * rng.standard_normal())
        parts = {"verify": verify_s, "draft:small": 0.1 * int(plan.length[0])}
        state = p.observe(outcome(seen, plan, plan.length, parts_s=parts), state, 0.0)
    assert 1.2 < p.drift(state)["verifying"] < 1.5  # the shape of larger passes has the rest


def test_counterfactual_scores_teach_a_draft_that_never_ran():
    p = planner(explore_share=0.0)
    state, seen = p.start(), view(1)
    for _ in range(60):
        plan, state = p.plan(seen, state, 0.0, RNG)
        free = FreeChains(seen.request, np.array([1]), np.array([8]), np.array([8]))
        state = p.observe(outcome(seen, plan, np.zeros(1, int), free=free), state, 0.0)
    plan, _ = p.plan(seen, state, 0.0, RNG)
    assert (plan.draft[0], plan.length[0]) == (1, 8)


def test_after_any_bad_history_every_draft_comes_back():
    p = planner(
        latency((0.05, 0.1)),
        acceptance=AcceptanceConfig(draft_memory_rows=300.0, request_memory_steps=50.0),
    )
    state, used = p.start(), set()
    for step in range(1500):
        seen = view(1, request=np.array([step // 50]))
        plan, state = p.plan(seen, state, float(step), RNG)
        if step > 700:
            used |= set(plan.draft[plan.length > 0].tolist())
        over = np.array([step // 50 - 1])
        state = p.observe(outcome(seen, plan, np.zeros(1, int), finished=over), state, float(step))
    assert used == {0, 1}


def test_finished_requests_leave_no_state():
    p = planner()
    state = p.start()
    for step in range(40):
        seen = view(2, request=np.array([2 * step, 2 * step + 1]))
        plan, state = p.plan(seen, state, 0.0, RNG)
        state = p.observe(outcome(seen, plan, plan.length, finished=seen.request), state, 0.0)
    assert state.acceptance.slots == {}
    assert len(state.acceptance.estimates.request_tokens) < 16


# -- against the arms, in a seeded world of Bernoulli acceptance


def simulate(policy, model, hazard, rows, steps, seed=0, drafts=DRAFTS):
    """Tokens per second of a closed loop, warm (the first fifth does not count).

    Request i has type i % types and accepts draft d's tokens at rate hazard[type][d].
    """
    rng, state = np.random.default_rng(seed), policy.start()
    ids, remaining = np.arange(rows), 40 + np.arange(rows) * 37 % 120
    catchup, tokens, seconds, cold = np.full((rows, len(drafts)), 2), 0, 0.0, (0, 0.0)
    for step in range(steps):
        cold = (tokens, seconds) if step == steps // 5 else cold
        seen = view(
            rows,
            drafts,
            request=ids,
            remaining=remaining,
            catchup=catchup,
            ceiling=_ceiling(remaining, len(drafts)),
        )
        plan, state = policy.plan(seen, state, seconds, rng)
        rate = np.array(
            [
                hazard[t][d] if d >= 0 else 0.0
                for t, d in zip(ids % len(hazard), plan.draft, strict=True)
            ]
        )
        passed = (rng.random((rows, 8)) < rate[:, None]) & (np.arange(8) < plan.length[:, None])
        accepted = np.cumprod(passed, axis=1).sum(axis=1)
        parts = {"verify": model.target.seconds(int(rows + plan.length.sum()))}
        for d in set(plan.draft[plan.length > 0].tolist()):
            alive = (plan.length[plan.draft == d, None] > np.arange(1, 8)).sum(axis=0)
            group = (plan.draft == d) & (plan.length > 0)
            parts[f"draft:{drafts[d]}"] = float(
                model.drafts[d].base(np.r_[catchup[group, d].sum(), alive[alive > 0]]).sum()
            )
        step_s = sum(parts.values())
        remaining = remaining - accepted - 1
        over = remaining <= 0
        result = outcome(seen, plan, accepted, step_s, parts_s=parts, finished=ids[over])
        state = policy.observe(result, state, seconds)
        seconds, tokens = seconds + step_s, tokens + int((accepted + 1).sum())
        catchup = catchup + accepted[:, None] + 1
        catchup[plan.length > 0, plan.draft[plan.length > 0]] = (
            1 + (accepted == plan.length)[plan.length > 0]
        )
        catchup[over] = 2
        ids = np.where(over, ids.max() + over.cumsum(), ids)
        remaining = np.where(over, 40 + ids * 37 % 120, remaining)
    return (tokens - cold[0]) / (seconds - cold[1])


def _ceiling(remaining, drafts):
    return np.repeat(np.minimum(8, remaining - 1)[:, None], drafts, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "hazard",
    [[[0.6, 0.8]], [[0.9, 0.9], [0.2, 0.2]], [[0.85, 0.4], [0.3, 0.9]]],
    ids=["uniform", "mixed", "hetero"],
)
def test_the_planner_is_within_3_percent_of_the_best_fixed_choice_or_beats_it(rows, hazard):
    """The arm is chosen in hindsight, on another seed than it is scored on."""
    model, steps, seeds = latency((0.05, 0.15), token_s=0.01), 1200 if rows == 1 else 400, (1, 2)
    arms = [FixedLength(d, k) for d in DRAFTS for k in (1, 2, 3, 5, 8)]
    best = max(arms, key=lambda arm: simulate(arm, model, hazard, rows, steps, seed=0))
    fixed = sum(simulate(best, model, hazard, rows, steps, seed) for seed in seeds)
    assert (
        sum(simulate(planner(model), model, hazard, rows, steps, seed) for seed in seeds)
        > 0.97 * fixed
    )


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_where_no_draft_pays_it_loses_at_most_2_percent_to_plain_decoding(rows):
    model, hazard = latency((0.3, 0.4)), [[0.1, 0.15]]
    plain = simulate(NoSpeculation(), model, hazard, rows, 50)
    assert simulate(planner(model), model, hazard, rows, 800) > 0.98 * plain


def test_a_step_of_nothing_but_prompts_that_end_is_learnt_from():
    """Their first tokens are in the outcome, but the view had no row to decode."""
    made = planner()
    empty = view(0, prefill_tokens=40)
    _, state = made.plan(empty, made.start(), 0.0, RNG)
    ended = view(2)
    result = outcome(ended, Plan.nothing(2), 0, 3.0, parts_s={"verify": 3.0}, prefill_tokens=40)
    after = made.observe(result, state, 0.1)
    assert made.drift(after)["verify"] > 1


def bushy(state, column, chances, positions=500, place=0, expected=0.6):
    """The state after trees of one token whose nodes are right as often as they claim; of their
    rows so much was ``expected``.
    """
    rng, count = np.random.default_rng(4), len(chances)
    right = rng.choice(count + 1, positions, p=[*chances, 1 - sum(chances)])
    row, depth = np.repeat(np.arange(positions), count), np.full(positions * count, place)
    state.calibration = state.calibration.learnt(
        np.full(len(row), column),
        np.zeros(len(row), np.bool_),
        np.tile(chances, positions),
        (right[:, None] == np.arange(count)).reshape(-1),
        row,
        depth,
        np.full(len(row), expected),
    )
    return state


def test_a_draft_is_expected_to_bring_what_the_trim_leaves_of_its_trees():
    """Half of what the tree holds is in its first node; a second one costs more than it brings."""
    chances = [0.4, 0.2, 0.1, 0.1]
    for token_s, left, nodes in ((0.0, 1.0, 4.0), (0.04, 0.5, 1.0), (0.2, 0.0, 0.0)):
        p = planner(latency((0.1, 0.1), token_s=token_s, free_tokens=1), **certain(0.8))
        state = bushy(p.start(), 0, chances)
        state.goodput = 8.0
        problem, _ = p.problem(view(8), state)
        tree, chain = problem.gain[0, :, 0]
        assert tree / chain == pytest.approx(left, abs=0.05)
        assert problem.nodes[0, :, 0] == pytest.approx([nodes, 1.0], abs=0.05)


def test_what_is_cut_off_next_to_a_path_takes_nothing_from_the_places_after_it():
    """Siblings end a path whether they are verified or not."""
    p = planner(latency((0.1, 0.1), token_s=0.04, free_tokens=1), **certain(0.8))
    state = p.start()
    for place in range(2):
        state = bushy(state, 0, [0.4, 0.2, 0.1, 0.1], place=place)
    state.goodput = 8.0
    problem, _ = p.problem(view(8), state)
    tree, chain = problem.gain[1, :, 0]
    assert tree / chain == pytest.approx(0.5, abs=0.05)


def test_a_path_that_is_cut_short_brings_nothing_at_later_places():
    """Later nodes are known where those before them were verified, and are better than most."""
    p = planner(latency((0.1, 0.1), token_s=0.04, free_tokens=1), **certain(0.8))
    state = p.start()
    for chance in (0.65, 0.25):
        state = bushy(state, 0, [chance])
    state = bushy(state, 0, [0.9], place=1)
    state.goodput = 8.0
    problem, _ = p.problem(view(8), state)
    cut, whole = problem.gain[1, :, 0]
    assert cut / whole == pytest.approx(0.65 / 0.9, abs=0.05)


def test_of_promising_proposals_more_is_left():
    """The poor ones lose most nodes, which says nothing of the others."""
    p = planner(latency((0.1,), token_s=0.04, free_tokens=1), ("small",), **certain(0.6))
    state = bushy(p.start(), 0, [0.16, 0.15, 0.15, 0.14], expected=0.4)
    state = bushy(state, 0, [0.8], expected=0.9)
    state.goodput = 8.0
    hazard = np.array([0.4, 0.9]).reshape(1, 1, 2)
    p.estimator.hazards = lambda state, request: hazard
    problem, _ = p.problem(view(2, drafts=("small",)), state)
    poor, promising = problem.gain[0, 0] / hazard[0, 0]
    assert poor < 0.2
    assert promising > 0.95


def test_a_tree_that_is_right_by_its_many_nodes_is_not_drafted_where_they_cost_too_much():
    p = planner(
        latency((0.1, 0.1), token_s=0.04, free_tokens=1), ("small", "large"), **certain(0.6)
    )
    state, seen = p.start(), view(16)
    for column in range(2):
        state = bushy(state, column, [0.16, 0.15, 0.15, 0.14])
    assert p.plan(seen, p.start(), 0.0, RNG)[0].length.any()
    assert not p.plan(seen, state, 0.0, RNG)[0].length.any()


def test_sampled_rows_are_planned_by_the_nodes_of_sampled_rows():
    p = planner(latency((0.1, 0.1), token_s=0.04, free_tokens=1), **certain(0.6))
    state = bushy(p.start(), 0, [0.16, 0.15, 0.15, 0.14])
    state.goodput = 8.0
    problem, _ = p.problem(view(2, sampled=np.array([False, True])), state)
    greedy, drawn = problem.gain[0, 0]
    assert greedy < drawn / 2


@pytest.mark.parametrize("bin_", [-1, 18, 10**9])
def test_evidence_that_is_no_bin_is_refused(bin_):
    """The compiled loops index by it."""
    p, seen = planner(), view(2, evidence=np.array([[0, 3], [bin_, 0]]))
    with pytest.raises(ValueError, match=rf"view.evidence must be 0 to 17, got .*{bin_}"):
        p.plan(seen, p.start(), 0.0, RNG)
