"""The choice for drafts that the target's device runs: one head, one depth, a number of nodes."""

from dataclasses import replace

import numpy as np
import pytest

from bench.micro.choices import step_problem
from policy import LatencyCurve, LatencyModel, Plan, StepNodes
from policy.loops.device import Offer, best_of, offer_of
from policy.loops.problem import TIE
from policy.loops.trim import BINS, BOUNDS
from policy.supply import learnt, no_supply
from policy.trim import Calibration, proposed_of
from tests.fakes.policies import RNG, latency, outcome, planner, view

DRAFTS = 2


def stairs(*widths):
    """A target whose passes take 0.3 s more beyond each of these widths."""
    tokens = np.arange(widths[-1] + 1)
    base_s = 1.0 + 0.3 * np.searchsorted(widths, tokens)
    return LatencyModel(LatencyCurve(base_s, 1.0), (LatencyCurve(np.full(2, 0.05), 0.0),) * DRAFTS)


def best_by_enumeration(problem, offer, forward_s, node_s, price):
    """The best objective of all drafts, depths and numbers of nodes, one node after the other."""
    found = [problem.base_value - price * problem.plain_s]
    for d in range(DRAFTS):
        for depth in range(1, problem.ceiling[d].max() + 1):
            each = [
                offer.accepted[d, :depth, b].sum() / count
                for b in reversed(range(BINS))
                for count in [offer.nodes[d, :depth, b].sum()]
                for _ in range(round(count))
            ]
            seconds = problem.speculation_s + forward_s[:depth, d].sum()
            for m in range(1, min(len(each), len(problem.undrafted_s) - 1) + 1):
                taken_s = seconds + problem.undrafted_s[m] + m * node_s
                if taken_s <= problem.limit_s:
                    found.append(problem.base_value + sum(each[:m]) - price * taken_s)
    return max(found)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_choice_of_all_is_found(seed):
    rng = np.random.default_rng(seed)
    rows, k_max = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    widths = np.cumsum(rng.integers(1, 6, 12))
    seen = view(rows, k=rng.integers(0, k_max + 1, (rows, DRAFTS)))
    if rng.random() < 0.3:
        seen = replace(seen, cap_s=float(rng.uniform(1, 8)))
    times = stairs(*widths).tables._replace(speculation_s=0.01)
    problem = step_problem(times, seen, np.full((k_max, DRAFTS, rows), 0.7), k_max, 16.0)
    places = problem.gain.shape[0]
    if not places:
        return
    nodes = rng.integers(0, 3, (DRAFTS, places, BINS)).astype(float)
    accepted = nodes * np.minimum(rng.normal(BOUNDS[1:], 0.1), 1).clip(0)
    offer = Offer(nodes, accepted)
    forward_s = rng.uniform(0.01, 0.5, (places, DRAFTS))
    node_s, price = float(rng.choice([0.0, 0.02])), float(rng.uniform(0.1, 3)) * rows
    found = best_of(problem, offer, forward_s, node_s, price)
    best = best_by_enumeration(problem, offer, forward_s, node_s, price)
    assert found.value - price * found.step_s == pytest.approx(best, abs=10 * TIE * (best + 10))
    assert found.step_s <= problem.limit_s


def offered(supply, hazard, ceiling=8):
    rows = hazard.shape[2]
    counts, none = Calibration.none(DRAFTS).counts, np.zeros(rows, np.int64)
    most = np.full((DRAFTS, rows), ceiling)
    return offer_of(supply, counts, none, none, most, hazard)


def taught(supply, chains, asked):
    """The supply after rows that showed these confidences, place by place."""
    row = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    claims, none = np.concatenate(chains), np.zeros(len(row), np.bool_)
    expected = np.full(len(row), 0.6)
    return learnt(supply, proposed_of(row, 0 * row, None, claims, none, expected), np.array(asked))


def test_places_bring_what_their_hazards_say():
    hazard = np.full((8, DRAFTS, 3), 0.6)
    survival = 3 * 0.6 ** np.arange(1, 9)
    known = taught(no_supply(DRAFTS, 8), [np.array([0.9, 0.5, 0.1])] * 50, [3] * 50)
    for supply in (no_supply(DRAFTS, 8), known):
        accepted = offered(supply, hazard).accepted.sum(2)
        assert accepted == pytest.approx(np.tile(survival, (DRAFTS, 1)))


def test_nodes_are_expected_where_they_were_seen():
    known = no_supply(DRAFTS, 8)
    for _ in range(20):  # the second place's node is likely in one row of two
        known = taught(known, [np.array([0.95, 0.9]), np.array([0.95, 0.05])], [2, 2])
    nodes = offered(known, np.full((8, DRAFTS, 4), 0.6)).nodes[0]
    likely, unlikely = (int(Calibration.bins(np.array([claim]))[0]) for claim in (0.9, 0.05))
    assert nodes[1, likely] == pytest.approx(2, rel=0.15)
    assert nodes[1, unlikely] == pytest.approx(2, rel=0.15)
    assert offered(known, np.full((8, DRAFTS, 4), 0.6)).nodes[1, 1, likely] == 0  # another draft


def test_a_step_of_another_policy_teaches_no_supply():
    before = no_supply(DRAFTS, 4)
    after = taught(before, [np.array([0.9, 0.8])], [0])
    assert not after.evidence_nodes.any()
    assert not after.proposals.any()


def test_a_plan_has_one_draft_one_depth_and_a_width_full_of_nodes():
    p = planner(stairs(4, 16, 32, 64), whole_batch=True, explore_share=0.0)
    seen = view(4, k=np.array([[8, 8], [8, 8], [2, 2], [0, 0]]))
    plan, _ = p.plan(seen, p.start(), 0.0, RNG)
    depth = int(plan.length.max())
    assert depth > 0
    assert plan.length.tolist() == [depth, depth, min(2, depth), 0]
    assert len(set(plan.draft[:3].tolist())) == 1
    assert plan.draft[3] == -1
    assert len(seen) + plan.nodes == 16


def test_a_dear_step_is_planned_without_proposals():
    p = planner(latency((5.0, 5.0)), whole_batch=True, explore_share=0.0)
    plan, _ = p.plan(view(4), p.start(), 0.0, RNG)
    assert not plan.length.any()
    assert plan.nodes == 0


def test_nodes_of_control_rows_are_verified_too():
    seen = view(3)
    control = np.array([False, False, True])
    fixed = Plan(np.zeros(3, np.int64), np.full(3, 5))
    p = planner(stairs(4, 16, 32, 64), whole_batch=True, explore_share=0.0)
    plan, _ = p.plan(replace(seen, control=control, control_plan=fixed), p.start(), 0.0, RNG)
    assert plan.length[2] == 0
    assert plan.nodes > 5
    assert (3 + plan.nodes) % 16 == 0


def test_what_rows_showed_is_learnt_of_the_step_that_asked_for_it():
    p = planner(stairs(4, 16, 32, 64), whole_batch=True)
    seen, later = view(2), view(2)
    plan, state = p.plan(seen, p.start(), 0.0, RNG)
    _, state = p.plan(later, state, 0.0, RNG)  # one submission ahead
    row = np.array([0, 1])
    nodes = StepNodes(row, np.full(2, 0.9), np.zeros(2, np.bool_), np.ones(2, np.bool_), 0 * row)
    after = p.observe(outcome(seen, plan, [1, 1], 1.0, nodes=nodes), state, 0.0)
    depth, draft = int(plan.length.max()), int(plan.draft[0])
    assert after.supply.proposals[draft].sum((0, 1)).tolist() == [2] * depth + [0] * (8 - depth)
    assert after.supply.evidence_nodes[draft].sum() == 2
