import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from backend.sequence import Proposal
from backend.speculation.step_log import StepLog
from policy import (
    AcceptanceConfig,
    AdaptivePlanner,
    LatencyCurve,
    LatencyModel,
    PlannerConfig,
    StepNodes,
)
from policy.latency import Correction
from policy.loops.times import WIDTH_STEPS
from policy.loops.trim import take_best
from policy.plan import DraftNodes, Plan
from policy.problem import Choice, score
from policy.trim import Calibration, trim_nodes
from tests.fakes.outcomes import outcome_of
from tests.fakes.policies import DRAFTS, RNG, latency, view


def drafted(*confidence, draft=0, sampled=False):
    """The rows' proposals by the confidences of their nodes."""
    row = np.repeat(np.arange(len(confidence)), [len(c) for c in confidence])
    q = len(row)
    return DraftNodes(
        row,
        np.full(q, draft),
        np.array([c for r in confidence for c in r], float),
        np.full(q, sampled),
    )


def target(verify_s):
    """A target; a pass of n tokens takes ``verify_s[n]``, one beyond them takes the last."""
    curve = LatencyCurve(np.array(verify_s, float), 0.0)
    return LatencyModel(curve, LatencyModel.unit(2).drafts)


def line(first_s, token_s, tokens=600):
    return target(first_s + token_s * np.arange(tokens))


def planned(length, price=1.0, **changes):
    return Plan(np.where(np.array(length) > 0, 0, -1), np.array(length), price=price, **changes)


def trim(latency, view_, plan, proposed, calibration=None, correction=None):
    known = calibration or Calibration.none(2)
    factors = np.ones(2 + len(latency.drafts)) if correction is None else correction
    times = Correction(factors).times(latency)
    return trim_nodes(times, known, view_, plan, proposed).tolist()


# -- the choice


def net(nodes, worth_by_row, verify_s, price):
    return (
        sum(sum(worth[:n]) for worth, n in zip(worth_by_row, nodes, strict=True))
        - price * verify_s[sum(nodes)]
    )


def test_no_choice_of_prefixes_is_worth_more_on_any_staircase():
    rng = np.random.default_rng(4)
    for _ in range(400):
        rows = int(rng.integers(1, 4))
        worth = [np.cumprod(rng.random(rng.integers(0, 5)) ** 0.5) for _ in range(rows)]
        sizes = [len(w) for w in worth]
        steps = np.where(rng.random(sum(sizes) + 1) < 0.4, rng.random(sum(sizes) + 1), 0.0)
        verify_s, price = 1 + np.cumsum(steps), rng.exponential(2.0)
        chosen, row = np.empty(rows, np.int64), np.repeat(np.arange(rows), sizes)
        take_best(row, np.concatenate(worth), verify_s, price, chosen)
        best = max(
            net(nodes, worth, verify_s, price)
            for nodes in itertools.product(*(range(s + 1) for s in sizes))
        )
        assert net(chosen, worth, verify_s, price) == pytest.approx(best)
        assert (chosen <= sizes).all()


def test_a_step_of_the_staircase_is_climbed_for_what_lies_beyond_it():
    one_dear_step = target([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 9.0])
    assert trim(one_dear_step, view(), planned([4]), drafted([0.6] * 4)) == [4]
    assert trim(one_dear_step, view(), planned([1]), drafted([0.6])) == [0]


def test_a_node_after_a_long_context_must_be_worth_more():
    curve = LatencyCurve(np.full(600, 1.0), 0.0, node_context_s=0.001)
    reading, seen = LatencyModel(curve, LatencyModel.unit(2).drafts), view(2)
    seen = replace(seen, context=np.array([100, 500]))
    same = drafted([0.6, 0.3, 0.2, 0.05], [0.6, 0.3, 0.2, 0.05])
    assert trim(reading, seen, planned([4, 4]), same) == [3, 1]


def test_where_time_is_free_all_are_verified_and_where_it_is_dear_none():
    same = drafted([0.3] * 5, [0.3] * 3, [])
    assert trim(line(1.0, 0.0), view(3), planned([5, 3, 0]), same) == [5, 3, 0]
    assert trim(line(1.0, 1.0), view(3), planned([5, 3, 0]), same) == [0, 0, 0]


def test_rows_whose_draft_is_sure_get_what_others_do_not():
    proposed = drafted([0.9, 0.8, 0.7, 0.6], [0.5, 0.1, 0.01], [0.95])
    assert trim(line(1.0, 0.55), view(3), planned([2, 3, 1]), proposed) == [4, 0, 1]


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_where_nothing_is_proposed_nothing_is_verified(rows):
    assert (
        trim(line(1.0, 0.1), view(rows), planned([2] * rows), drafted(*[[]] * rows)) == [0] * rows
    )


def test_a_huge_batch_is_trimmed_as_its_rows_would_be_where_no_token_is_cheaper_than_another():
    rng = np.random.default_rng(3)
    confidence = [np.cumprod(rng.random(8) ** 0.3).tolist() for _ in range(512)]
    nodes = trim(line(1.0, 0.4, 8000), view(512), planned([4] * 512), drafted(*confidence))
    assert nodes == [sum(c > 0.4 for c in row) for row in confidence]


# -- the pass that it prices


def stairs(edge, high_s=1.0):
    """A target that takes ``high_s`` more from ``edge`` tokens on."""
    return target([1.0] * edge + [1.0 + high_s] * 200)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [(2, {}), (2, {"prefill_tokens": 6})],
)
def test_the_staircase_begins_after_what_the_pass_has_anyway(rows, changes):
    seen, latency = (
        view(rows, **changes),
        stairs(2 + changes.get("prefill_tokens", 0) + 4, 5.0),
    )
    proposed, plan = (
        drafted([0.9, 0.5, 0.2], [0.8, 0.3, 0.1], *[[]] * (rows - 2)),
        planned([3, 3] + [0] * (rows - 2)),
    )
    assert trim(latency, seen, plan, proposed)[:2] == [2, 1]


def test_measured_times_count_and_not_the_table_s():
    latency, slow = line(1.0, 0.1), np.array([4.0, 1.0, 1.0, 1.0])
    proposed = drafted([0.9, 0.5, 0.3, 0.2])
    assert trim(latency, view(), planned([4]), proposed) == [4]
    assert trim(latency, view(), planned([4]), proposed, correction=slow) == [2]


def test_no_step_is_longer_than_the_cap_or_than_its_plan():
    latency, proposed = line(1.0, 0.1), drafted([0.9] * 8)
    for cap_s, predicted_s, nodes in (
        (math.inf, 2.0, 8),
        (2.15, 2.0, 4),
        (2.0, 2.0, 3),
        (1.5, 2.0, 3),
    ):
        plan = planned([3], predicted_s=predicted_s)
        assert trim(latency, view(cap_s=cap_s), plan, proposed) == [nodes]


def test_a_pass_is_as_wide_as_the_last_one_where_that_is_worth_it():
    rng, token_s, rows = np.random.default_rng(7), 0.05, 3
    for _ in range(400):
        confidence = np.cumprod(rng.random(12) ** 0.3)
        last, change, price = rng.integers(1, 20), int(rng.integers(1, 65)), rng.exponential(4.0)
        seen = view(rows, pass_tokens=int(last), change_tokens=change)

        def pass_s(tokens, last=last, change=change):
            changed_s = 1 + token_s * (tokens + change / WIDTH_STEPS)
            same_s = 1 + token_s * last
            return min(same_s, changed_s) if tokens <= last else changed_s

        worth = [
            confidence[:nodes].sum() - price * pass_s(rows + nodes)
            for nodes in range(len(confidence) + 1)
        ]
        plan = planned([4, 0, 0], price)
        nodes = trim(line(1.0, token_s), seen, plan, drafted(confidence, [], []))
        assert nodes[1:] == [0, 0]
        assert worth[nodes[0]] == pytest.approx(max(worth))


@pytest.mark.parametrize(
    ("pass_tokens", "nodes"), [(0, 2), (2, 1), (3, 2), (5, 4), (6, 5), (9, 2), (300, 2)]
)
def test_few_nodes_more_fill_a_pass_and_few_less_keep_it_as_narrow(pass_tokens, nodes):
    seen = view(pass_tokens=pass_tokens, change_tokens=3 * int(WIDTH_STEPS))
    proposed = drafted([0.9, 0.7, 0.45, 0.4, 0.35])
    assert trim(line(1.0, 0.5), seen, planned([4]), proposed) == [nodes]


# -- what confidences are worth


def claiming(claimed, accepted, nodes=2000, draft=0):
    rng, same = np.random.default_rng(1), np.full(nodes, draft)
    return Calibration.none(2).learnt(
        same, same < 0, np.full(nodes, claimed), rng.random(nodes) < accepted
    )


def test_a_draft_that_claims_too_much_is_cut_and_one_that_claims_too_little_extended():
    proposed, latency = drafted([0.9, 0.9, 0.6, 0.6]), line(1.0, 0.5)
    assert trim(latency, view(), planned([4]), proposed) == [4]
    assert trim(latency, view(), planned([4]), proposed, claiming(0.9, 0.3)) == [0]
    modest = drafted([0.4, 0.4, 0.4])
    assert trim(latency, view(), planned([1]), modest) == [0]
    assert trim(latency, view(), planned([1]), modest, claiming(0.4, 0.8)) == [3]


# -- in the planner


def planner(latency, **config):
    sure = AcceptanceConfig(prior_hazard=0.8, prior_strength=1e12)
    return AdaptivePlanner(
        DRAFTS, latency, PlannerConfig(acceptance=sure, explore_share=0.0, **config)
    )


def outcome(seen, plan, **changes):
    n = len(seen)
    none = np.zeros(n, np.int64)
    columns = seen.request, plan.draft, plan.length, none, none + 1, plan.length, plan.length
    return outcome_of(*columns, measured_s=1.0, view=seen, **changes)


def fates(q, claimed, accepted):
    rows, sampled = np.zeros(q, np.int64), np.zeros(q, np.bool_)
    return StepNodes(rows, np.full(q, claimed), sampled, np.full(q, accepted))


@pytest.mark.parametrize(("length", "nodes"), [([3, 1, 0], [3, 1, 0]), ([8, 1, 2], [4, 1, 0])])
def test_a_plan_without_a_price_is_followed_as_far_as_there_are_nodes(length, nodes):
    proposed = drafted([0.9, 0.8, 0.1, 0.1], [0.9, 0.1], [])
    p, plan = planner(line(1.0, 9.0)), planned(length, price=0.0)
    assert p.trim(view(3), plan, proposed, p.start()).tolist() == nodes


def claims(*likely):
    """The confidence a draft must claim of a chain for its nodes to be this likely, given the
    hazard of 0.8 that is expected of it: the odds are those in the middle.
    """
    odds = np.array(likely) / (1 - np.array(likely))
    expected = 0.8 ** np.arange(1, len(likely) + 1)
    claimed = odds**2 * (1 - expected) / expected
    return (claimed / (1 + claimed)).tolist()


def test_the_planner_trims_by_the_price_of_its_plan():
    p = planner(line(1.0, 0.05))
    for rows in (1, 4):
        plan, state = p.plan(view(rows), p.start(), 0.0, RNG)
        token_s = 0.05 * plan.price
        sure, unsure = claims(*[0.9] * 3, 1.01 * token_s), claims(*[0.99 * token_s] * 4)
        assert plan.price > 0
        assert p.trim(view(rows), plan, drafted(*[sure] * rows), state).tolist() == [4] * rows
        assert p.trim(view(rows), plan, drafted(*[unsure] * rows), state).tolist() == [0] * rows


@pytest.mark.parametrize("rows", [1, 4])
def test_a_planner_learns_from_every_step_what_confidences_are_worth(rows):
    p = planner(line(1.0, 0.05))
    state, seen = p.start(), view(rows)
    for step in range(60):
        plan, state = p.plan(seen, state, float(step), RNG)
        drafting = replace(plan, draft=np.zeros(rows, np.int64))
        done = outcome(seen, drafting, nodes=fates(8, 0.9, accepted=False))
        done.rows = replace(done.rows, scored=np.zeros(rows, np.int64))  # nothing of acceptance
        state = p.observe(done, state, float(step))
    data = p.save(state, 60.0)
    nodes = sum(np.sum(draft["nodes"]) for draft in data["tenants"][0]["drafts"].values())
    assert nodes == pytest.approx(8 * 60, rel=0.05)
    priced, proposed = planned([4] * rows, price=4.0), drafted(*[[0.5] * 4] * rows)
    assert p.trim(seen, priced, proposed, p.start()).tolist() == [4] * rows
    assert p.trim(seen, priced, proposed, p.load(data, 0.0, 0.0)).tolist() == [0] * rows


@pytest.mark.parametrize(
    ("verified", "emitted", "fates"),
    [
        (0, [7], "1- 4-"),
        (0, [4], "1- 4+"),
        (1, [1, 2], "1+ 2+ 4- 5-"),
        (1, [1, 7], "1+ 2- 4- 5-"),
        (6, [1, 7], "1+ 2- 3- 4- 5- 6-"),
        (6, [1], "1+ 4-"),  # where the text ends
    ],
)
def test_only_nodes_after_the_text_or_a_verified_one_are_evidence(verified, emitted, fates):
    """Only failures would ever be seen of the others."""
    made, tokens = (
        StepLog(DRAFTS),
        [1, 2, 3, 4, 5, 6],
    )  # 1 - 2 - 3, 4, and 5 after 1 with 6 after it
    made.record(
        3,
        Proposal("small", tokens, [-1, 0, 1, -1, 0, 4], [1 - t / 10 for t in tokens]),
        verified,
        emitted,
        sampled=True,
    )
    done = made.outcome()
    written = [
        f"{10 - 10 * c:.0f}{'-+'[accepted]}"
        for c, accepted in zip(
            done.nodes.confidence.tolist(), done.nodes.accepted.tolist(), strict=True
        )
    ]
    assert " ".join(written) == fates


def test_a_draft_that_is_cut_short_is_not_believed_less_for_it():
    rng, hazard, nodes = np.random.default_rng(5), 0.8, 6
    confidence = hazard ** np.arange(1, nodes + 1)
    calibration, latency, verified = Calibration.none(2), line(1.0, 0.5), []
    for _ in range(3000):
        verified += trim(latency, view(), planned([nodes]), drafted(confidence), calibration)
        known = min(verified[-1] + 1, nodes)
        accepted = np.cumprod(rng.random(nodes) < hazard)[:known] > 0
        none = np.zeros(known, np.int64)
        calibration = calibration.learnt(none, none > 0, confidence[:known], accepted)
    assert np.bincount(verified[1000:]).argmax() == 3


@pytest.mark.parametrize(
    "per_node_s", [[0.02] * 80, [0.2] * 8 + [0.0] * 72, [0.0] * 8 + [0.2] * 72]
)
def test_a_plan_takes_as_long_as_the_pass_that_the_trim_leaves(per_node_s):
    """Few of eight proposed tokens are left, wherever the curve is steep."""
    curve = target(np.concatenate([[1.0, 1.0], 1 + np.cumsum(per_node_s)])).target
    times = LatencyModel(curve, latency((0.005, 0.005)).drafts)
    p = AdaptivePlanner(DRAFTS, times, PlannerConfig(explore_share=0.0))
    state, seen, many = p.admit(view(4), p.start(), 0.0), view(4), 400
    nodes = np.zeros(many, np.int64), np.zeros(many, np.bool_), np.full(many, 0.05)
    known = np.arange(many) % 20 == 0, np.arange(many), np.zeros(many, np.int64)
    state.calibration = state.calibration.learnt(*nodes, *known)
    state.goodput = 4.0
    problem, _ = p.problem(seen, state)
    left = problem.nodes[:, 0].sum()
    assert left < 16
    seconds = score(problem, Choice(np.zeros(4, np.int64), np.full(4, 8))).step_s
    drafting_s = 8 * 0.005
    verifying_s = np.interp(4 + left, np.arange(len(curve.base_s)), curve.base_s)
    assert seconds == pytest.approx(verifying_s + drafting_s, rel=1e-6)


@pytest.mark.parametrize(("first_s", "drafts"), [(0.8, False), (0.05, True)])
def test_dropped_nodes_do_not_give_back_what_the_first_verified_one_costs(first_s, drafts):
    """One node in four is accepted and worth less than a pass that verifies some takes more."""
    modest = AcceptanceConfig(prior_hazard=0.3, prior_strength=1e12)
    curve = target([1.0, 1.0] + [1.0 + first_s] * 100).target
    times = LatencyModel(curve, latency((0.005, 0.005)).drafts)
    p = AdaptivePlanner(DRAFTS, times, PlannerConfig(acceptance=modest, explore_share=0.0))
    state, seen = p.start(), view()
    confidence, accepted = np.tile([0.6, 0.1, 0.1, 0.1], 40), np.arange(160) % 4 == 0
    rows, sampled = np.zeros(160, np.int64), np.zeros(160, np.bool_)
    for step in range(20):
        plan, state = p.plan(seen, state, float(step), RNG)
        drafting = replace(plan, draft=np.zeros(1, np.int64))
        done = outcome(seen, drafting, nodes=StepNodes(rows, confidence, sampled, accepted))
        done.rows = replace(done.rows, scored=np.zeros(1, np.int64))  # nothing of acceptance
        state = p.observe(done, state, float(step))
    plan, _ = p.plan(seen, state, 20.0, RNG)
    assert (plan.length.sum() > 0) == drafts
