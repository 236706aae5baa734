"""The planner of engines that can do more than one chain a row: what it plans, what it refuses and why, what it learns."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from policy import NO_DRAFT, AcceptanceConfig, LatencyModel, Plan, PlannerConfig
from policy.goodput import Choice, Score, score
from policy.latency import LatencyCurve
from policy.learned import LearnedError
from policy.merging import merged_tokens
from policy.offers import Basis, merge_offer
from policy.ranks import RankConfig, RankModel
from policy.shaped import ShapedPlanner
from policy.shapes import CHAINS_ONLY, COHORTS, MERGED, PIECES, TREES, Shapes
from tests.unit.test_policy_planner import RNG, UNSHAKEABLE, latency, outcome, planner, view

ONE = ("small",)


def line(fixed_s, token_s, context_s=0.0):
    return LatencyCurve(np.array([fixed_s, fixed_s + token_s]), token_s, 0.0, context_s)


def staircase(level_tokens, token_s):
    """Seconds of a forward that is level up to so many tokens and rises behind."""
    tokens = np.arange(2048)
    return LatencyCurve(1.0 + token_s * np.maximum(tokens - level_tokens, 0), token_s)


def shaped(model, drafts=ONE, rate=0.6, siblings=None, **shapes):
    """A planner that knows the acceptance rate of chains, and of siblings if these are given, and does not explore."""
    acceptance = AcceptanceConfig(prior_hazard=rate, prior_strength=UNSHAKEABLE, request_variance=1e-3)
    made = ShapedPlanner(drafts, model, PlannerConfig(acceptance=acceptance, explore_share=0.0, k_max=4), Shapes(**shapes))
    if siblings is not None:
        made._ranks = RankModel(len(drafts), 4, made.shapes.tree_width, RankConfig(sibling=siblings, decay=0.7, strength=UNSHAKEABLE))
    return made


def planned(made, seen, steps=1):
    """The plan of a step after so many for the same batch; only cohorts need more than one."""
    state = made.start()
    for _ in range(steps):
        plan, state = made.plan(seen, state, 0.0, RNG)
    return plan


ROOF = LatencyModel(staircase(24, 1 / 24), (line(0.1, 0.0),))


def test_a_draft_without_second_choices_gets_no_siblings():
    plans = [planned(shaped(ROOF, tree_width=3, siblings=0.4, single_choice=single), view(2, ONE)) for single in ((), (0,))]
    assert [plan.shape is None for plan in plans] == [False, True]
    assert plans[1].notes["why_not"][TREES] == "does not pay: 0.00"


def test_as_the_batch_grows_trees_narrow_to_chains_and_then_to_no_speculation():
    made = shaped(ROOF, tree_width=3, siblings=0.4)
    plans = {rows: planned(made, view(rows, ONE)) for rows in (1, 2, 4, 8, 24, 64)}
    widest = [
        1 if plan.shape is None and plan.length.any() else int(plan.shape.width.max()) if plan.shape else 0 for plan in plans.values()
    ]
    assert widest == sorted(widest, reverse=True)
    assert (widest[0], widest[-1]) == (3, 0)
    assert 1 in widest
    assert TREES not in plans[1].notes["why_not"]
    assert plans[64].notes["why_not"][TREES] == "no speculation"
    chains = next(plan for plan, wide in zip(plans.values(), widest, strict=True) if wide == 1)
    assert chains.notes["why_not"][TREES].startswith("does not pay: 0.")


def test_a_tree_s_length_is_its_depth_and_its_figures_count_its_siblings():
    made, seen = shaped(ROOF, tree_width=3, siblings=0.4), view(1, ONE)
    plan, chains = planned(made, seen), planned(shaped(ROOF), seen)
    assert plan.shape.width.shape == (1, 4)
    assert plan.length[0] == (plan.shape.width[0] > 0).sum()
    assert plan.predicted_tokens > chains.predicted_tokens
    spine, siblings = 0.6, [0.4, 0.28]
    hit, emitted, reached = 0.0, 1.0, 1.0
    for width in plan.shape.width[0, : plan.length[0]]:
        missed = np.prod([1 - h for h in [spine, *siblings][:width]])
        hit = 1 - missed
        emitted, reached = emitted + reached * hit, reached * spine
    assert plan.predicted_tokens == pytest.approx(emitted)
    tokens = 1 + plan.shape.width.sum()
    assert plan.predicted_s == pytest.approx(1.0 + max(tokens - 24, 0) / 24 + 0.1 * plan.length[0])


@pytest.mark.parametrize("limits", [{"headroom": 3}, {"cap_s": 1.25}, {"limit": np.array([0])}])
def test_room_in_kv_a_cap_and_places_bind_trees_too(limits):
    made = shaped(LatencyModel(staircase(2, 0.05), (line(0.1, 0.0),)), tree_width=3, siblings=0.5)
    free, bound = planned(made, view(1, ONE)), planned(made, view(1, ONE, **limits))
    proposed = 0 if bound.shape is None else int(bound.shape.width.sum())
    assert free.shape.width.sum() > 3 >= proposed
    assert bound.predicted_s <= limits.get("cap_s", np.inf)
    if "limit" in limits:
        assert not bound.length.any()


def test_a_row_s_tree_has_no_more_nodes_than_the_engine_takes():
    plan = planned(shaped(ROOF, tree_width=3, siblings=0.5, most_nodes=5), view(2, ONE))
    assert plan.shape.width.sum(1).max() <= 5


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
    made = shaped(ROOF, tree_width=3, siblings=0.5, cohorts=2, contention=1.0)
    given = Plan(np.full(2, NO_DRAFT), np.zeros(2, np.int64))
    plan = planned(made, view(2, ONE, control=np.array([True, False]), given=given))
    assert plan.shape is None
    assert plan.notes["why_not"][TREES] == plan.notes["why_not"][COHORTS] == "rows of another arm"


# -- merged chains


TWO = LatencyModel(staircase(40, 0.05), (line(0.1, 0.0), line(0.05, 0.0)))


def rescuing(share, **shapes):
    made = shaped(TWO, ("small", "large"), rate=0.5, merges=True, **shapes)
    made._ranks = RankModel(2, 4, made.shapes.tree_width, RankConfig(rescue=share, strength=UNSHAKEABLE))
    return made


def test_a_second_chain_is_added_only_where_it_rescues_what_the_first_misses():
    plan, none = planned(rescuing(0.9), view(2)), planned(rescuing(0.01), view(2))
    assert (plan.shape.second_length > 0).all()
    assert (plan.shape.second_draft != plan.draft).all()
    first, second = [np.full(k, 0.5) for k in plan.length], [np.array([0.45, *[0.5] * (k - 1)]) for k in plan.shape.second_length]
    assert plan.predicted_tokens == pytest.approx(sum(merged_tokens(pair) for pair in zip(first, second, strict=True)))
    assert none.shape is None
    assert none.notes["why_not"][MERGED].startswith("does not pay: 0.")
    assert planned(shaped(ROOF, merges=True), view(2, ONE)).notes["why_not"][MERGED] == "one draft"


def test_of_trees_and_merged_chains_the_one_that_pays_more_is_taken():
    for sibling, rescue, taken, other in ((0.03, 0.9, MERGED, TREES), (0.35, 0.75, TREES, MERGED)):
        made = rescuing(rescue, tree_width=2)
        made._ranks = RankModel(2, 4, 2, RankConfig(sibling=sibling, rescue=rescue, strength=UNSHAKEABLE))
        plan = planned(made, view(1))
        assert (plan.shape.width is None, plan.shape.second_draft is None) == (taken == MERGED, taken == TREES)
        assert taken not in plan.notes["why_not"]
        assert plan.notes["why_not"][other] == f"{taken} pay more"


@pytest.mark.parametrize("seed", range(40))
def test_the_second_chains_of_a_row_are_the_best_of_all_lengths(seed):
    rng = np.random.default_rng(seed)
    model = LatencyModel(LatencyCurve(1 + np.cumsum(rng.exponential(0.1, 64)), 0.1), (line(0.1, 0.01), line(0.05, 0.02)))
    made = shaped(model, ("small", "large"), merges=True)
    seen = view(1, catchup=rng.integers(1, 9, (1, 2)))
    problem, *_ = made.problem(seen, made.start(), made.admitted(seen, made.start(), 0.0))
    hazard, rescue, price = rng.uniform(0.2, 0.9, (1, 2, 4)), rng.uniform(0, 0.9, (1, 2, 2)), float(rng.uniform(0.1, 2.0))
    problem = replace(problem, gain=np.cumprod(hazard, axis=2).transpose(2, 1, 0))
    chains = Choice(np.array([0]), np.array([2]))
    offer, why = merge_offer(Basis(problem, np.ones(1), hazard, chains, score(problem, chains), price, 64, False), rescue)

    def objective(length):
        tokens = merged_tokens([hazard[0, 0, :2], np.array([rescue[0, 0, 1], *hazard[0, 1, 1:]])[:length]])
        alone = replace(problem, verify_s=np.zeros(99), speculation_s=0.0)
        second_s = score(alone, Choice(np.array([1]), np.array([length]))).charged_s if length else 0.0
        first = score(problem, chains)
        seconds = first.charged_s + second_s + problem.verify_s[2 + length] - problem.verify_s[2]
        return Score(tokens, seconds, seconds).objective(price)

    best = max(map(objective, range(5)))
    if offer is None:
        assert best == pytest.approx(objective(0))
        assert why.startswith("does not pay")
    else:
        assert offer.result.objective(price) == pytest.approx(best)
        assert offer.tokens == pytest.approx(offer.result.value)


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


@pytest.mark.parametrize("setting", [{"tree_width": 0}, {"cohorts": 0}, {"contention": 0.9}, {"merge_tokens": -1.0}, {"most_nodes": 0}])
def test_a_capability_out_of_range_is_an_error_that_names_it(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} must be >= .*, got {value}"):
        Shapes(**setting)
    with pytest.raises(ValueError, match="cohorts must be 1 for an engine that pads"):
        Shapes(pads=True, cohorts=2)


# -- what it learns


def played(made, steps, rank, accepted=0):
    """Steps of one row whose spine holds ``accepted`` tokens and whose sibling of a rank is accepted (0: none), as planned."""
    state, seen = made.start(), view(1, ONE)
    for step in range(steps):
        plan, state = made.plan(seen, state, 0.01 * step, RNG)
        sibling = np.array([rank if plan.shape is not None and plan.shape.width[0, 0] >= rank else 0])
        state = made.observe(outcome(seen, plan, np.array([accepted]), shape=plan.shape, rank=sibling), state, 0.01 * step)
    return plan, state


def test_siblings_that_never_hold_are_given_up_and_come_back_with_time():
    made = shaped(ROOF, tree_width=3)
    first = planned(made, view(1, ONE))
    _, state = played(made, 80, 0)
    assert first.shape is not None
    dear = shaped(LatencyModel(staircase(2, 0.03), (line(0.1, 0.0),)), tree_width=3)
    assert planned(dear, view(1, ONE)).shape is not None
    assert dear.plan(view(1, ONE), replace(dear.start(), ranks=state.ranks), 1.0, RNG)[0].shape is None
    assert dear.plan(view(1, ONE), replace(dear.start(), ranks=state.ranks), 1e6, RNG)[0].shape is not None


def test_the_evidence_of_a_tree_is_up_to_the_sibling_that_held():
    made = shaped(ROOF, tree_width=3)
    _, state = played(made, 1, 2)
    assert state.ranks.sibling_tested[0, 0, 0].tolist() == [1, 0]
    assert state.ranks.sibling_accepted[0, 0, 0].tolist() == [1, 0]
    _, state = played(made, 1, 0)
    assert state.ranks.sibling_tested[0, 0, 0].tolist() == [1, 1]
    assert not state.ranks.sibling_accepted.any()


def test_a_free_draft_s_score_tells_whether_it_rescues():
    made, seen = rescuing(0.5), view(1)
    made._ranks = RankModel(2, 4, 1)
    plan = Plan(np.array([0]), np.array([2]))
    free = {"free_request": np.array([0]), "free_draft": np.array([1]), "free_accepted": np.array([1]), "free_scored": np.array([1])}
    state = made.start()
    for accepted in (0, 1):  # of the second step nothing is to be learnt: the first draft was right
        state = made.observe(outcome(seen, plan, np.array([accepted]), **free), state, 0.0)
    assert state.ranks.rescue_tested.tolist()[0] == [[0, 1], [0, 0]]
    assert state.ranks.rescue_accepted.tolist()[0] == [[0, 1], [0, 0]]


def test_what_is_learnt_of_ranks_outlasts_a_restart_and_what_does_not_fit_is_refused():
    made = shaped(ROOF, tree_width=3)
    _, state = played(made, 20, 2)
    data = made.save(state, 1.0)
    back = made.load(data, 1000.0, 0.0)
    assert np.allclose(back.ranks.sibling_tested, state.ranks.sibling_tested, rtol=0.01)
    assert made.load({k: v for k, v in data.items() if k != "ranks"}, 0.0, 0.0).ranks.sibling_tested.sum() == 0
    wrong = {**data, "ranks": {**data["ranks"], "sibling_accepted": (np.array(data["ranks"]["sibling_tested"]) + 1).tolist()}}
    with pytest.raises(LearnedError, match="sibling_accepted is out of range"):
        made.load(wrong, 0.0, 0.0)
    with pytest.raises(LearnedError, match="ranks must be an object"):
        made.load({**data, "ranks": 3}, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_estimates_never_rise_with_the_rank(seed):
    rng = np.random.default_rng(seed)
    model = RankModel(2, 3, 4)
    tested = rng.integers(0, 50, (3, 2, 3, 3)).astype(float)
    state = replace(model.start(), sibling_tested=tested, sibling_accepted=tested * rng.random(tested.shape))
    hazard = model.siblings(state, np.array([0, 1, 2]))
    assert (np.diff(hazard, axis=3) <= 0).all()
    assert all(0 < value < 1 for value in itertools.chain(hazard.ravel().tolist()))


FLAT = LatencyModel(line(0.5, 0.001, 1e-4), (line(0.01, 0.0), line(0.02, 0.0)))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (FLAT, {"rate": 0.6, "tree_width": 3}),
        (LatencyModel(OVERLAPPING.target, OVERLAPPING.drafts * 2), {"rate": 0.97, "cohorts": 2, "contention": 1.02}),
        (FLAT, {"rate": 0.6, "pads": True, "merge_tokens": 8.0}),
        (FLAT, {"rate": 0.6, "merges": True}),
    ],
)
def test_a_step_that_takes_as_long_as_planned_teaches_no_correction(model, shapes):
    drafts = ("small", "large")
    made = shaped(model, drafts, **shapes)
    made._ranks = RankModel(2, 4, made.shapes.tree_width, RankConfig(sibling=0.6, rescue=0.95, strength=UNSHAKEABLE))
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
