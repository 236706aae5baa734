"""Estimates from one tenant's texts move no plan of another."""

import json
from dataclasses import replace

import numpy as np
import pytest

from policy import AcceptanceConfig, StepNodes
from policy.plan import DraftNodes, Plan
from policy.simulation.arms import make_policy
from policy.simulation.fleet import simulate_closed
from policy.simulation.presets import llama_8b_h100
from policy.simulation.workload import Category, Drift, Mix, backlog, draw
from policy.tenants import NO_TENANT, Tenants
from policy.wrappers import Wrapper
from tests.fakes.policies import RNG, latency, outcome, planner, view

NORMAL, HOSTILE = 0, 77


def loop(p, state, tenants, rates, *, first, steps=6, requests=10, now=0.0):
    """Serve batches of one row for each of ``tenants``; return the state and, by tenant, the
    lengths that were planned for it.

    A draft's token is accepted at the tenant's rate; which ones depends on the row's request and
    step alone.
    """
    lengths = {tenant: [] for tenant in tenants}
    for number in range(requests):
        request = np.array([first + 100 * tenants.index(t) + number for t in tenants])
        seen = view(len(tenants), request=request, tenant=np.array(tenants))
        for step in range(steps):
            plan, state = p.plan(seen, state, now, RNG)
            chain = replace(plan, draft=np.zeros(len(tenants), np.int64))
            accepted = [
                int(np.cumprod(np.random.default_rng([r, step]).random(8) < rates[t]).sum())
                for r, t in zip(request.tolist(), tenants, strict=True)
            ]
            for tenant, length in zip(tenants, plan.length.tolist(), strict=True):
                lengths[tenant].append(length)
            over = request if step == steps - 1 else np.zeros(0, np.int64)
            done = outcome(seen, replace(chain, length=np.full(len(tenants), 4)), accepted, 1.0)
            state = p.observe(replace(done, finished=over), state, now)
            now += 0.01
    return state, lengths


@pytest.mark.medium
@pytest.mark.parametrize("rate", [0.0, 0.05, 1.0])
def test_a_flood_of_another_tenant_s_requests_changes_no_planned_length(rate):
    """Random text that no draft guesses, or text that every draft guesses."""
    p, rates = planner(explore_share=0.0), {NORMAL: 0.7, HOSTILE: rate}
    known, _ = loop(p, p.start(), [NORMAL], rates, first=1)
    flooded, _ = loop(p, known, [HOSTILE], rates, first=5000, requests=200)
    shared, _ = loop(p, known, [NORMAL], {NORMAL: rate}, first=5000, requests=200)
    later = {"first": 9000, "now": 100.0}
    _, before = loop(p, known, [NORMAL], rates, **later)
    _, after = loop(p, flooded, [NORMAL], rates, **later)
    _, moved = loop(p, shared, [NORMAL], rates, **later)
    for name in ("draft_hazard", "variance"):
        mine, its = (getattr(s.acceptance.estimates, name)[:2] for s in (known, flooded))
        np.testing.assert_allclose(its, mine, rtol=0.01)  # it fades by time alone
    plain, flood, one = (np.mean(lengths[NORMAL]) for lengths in (before, after, moved))
    assert plain > 1
    assert flood == pytest.approx(plain, rel=0.02)  # the price of the last step is common to all
    assert one != pytest.approx(plain, rel=0.1)  # as it was of one tenant


def test_another_tenant_s_rows_do_not_change_the_estimates():
    p = planner(explore_share=0.0)
    one, _ = loop(p, p.start(), [NORMAL], {NORMAL: 0.7}, first=1)
    for rate in (0.0, 0.95):
        both, _ = loop(p, p.start(), [NORMAL, HOSTILE], {NORMAL: 0.7, HOSTILE: rate}, first=1)
        drafts = len(p.drafts)
        for name in ("draft_accepted", "draft_reached", "draft_hazard", "variance"):
            alone, together = (getattr(s.acceptance.estimates, name) for s in (one, both))
            np.testing.assert_allclose(together[:drafts], alone, rtol=1e-12)
            assert not np.allclose(together[drafts:], alone)
        assert both.acceptance.estimates.requests[0] == one.acceptance.estimates.requests[0]


def test_confidences_are_judged_by_the_own_nodes():
    p = planner(latency(token_s=0.3, free_tokens=1))
    seen = view(2, request=np.array([1, 2]), tenant=np.array([NORMAL, HOSTILE]))
    _, state = p.plan(seen, p.start(), 0.0, RNG)
    chain = Plan(np.zeros(2, np.int64), np.full(2, 4))
    none, four = np.zeros(2, np.int64), np.full(2, 4)
    for step in range(100):
        right = np.array([4, 0])
        nodes = StepNodes(
            np.repeat([0, 1], 4),
            np.full(8, 0.9),
            np.zeros(8, np.bool_),
            np.repeat([True, False], 4),
        )
        done = outcome(seen, chain, none, nodes=nodes)
        done.rows = replace(done.rows, verified=right, followed=right, accepted=right, scored=four)
        _, state = p.plan(seen, state, 0.01 * step, RNG)
        state = p.observe(done, state, 0.01 * step)
    column = np.array([0, 2])
    mine, theirs = state.calibration.probability(column, none > 0, np.full(2, 0.6)).tolist()
    assert theirs < mine - 0.2
    confident = DraftNodes(
        np.repeat([0, 1], 4), np.zeros(8, np.int64), np.full(8, 0.9), np.zeros(8, bool)
    )
    nodes = p.trim(seen, replace(chain, price=1.0), confident, state)
    assert nodes.tolist() == [4, 0]


def test_one_tenant_is_one_whether_it_has_a_salt_or_not():
    p = planner()
    plain, one = loop(p, p.start(), [NORMAL], {NORMAL: 0.7}, first=1)
    salted, other = loop(p, p.start(), [HOSTILE], {HOSTILE: 0.7}, first=1)
    assert one[NORMAL] == other[HOSTILE]
    drafts = len(p.drafts)
    np.testing.assert_allclose(
        salted.acceptance.estimates.draft_hazard[drafts:],
        plain.acceptance.estimates.draft_hazard,
        rtol=1e-12,
    )


def test_of_more_tenants_than_are_remembered_the_least_recently_used_idle_one_begins_again():
    p = planner(acceptance=AcceptanceConfig(most_tenants=2))
    state, _ = loop(p, p.start(), [1], {1: 0.9}, first=1)
    state, _ = loop(p, state, [2], {2: 0.1}, first=1000)
    assert sorted(state.tenants.ids.tolist()) == [1, 2]
    assert state.tenants.rows == 2
    first = state.acceptance.estimates.draft_hazard.copy()
    state, _ = loop(p, state, [2], {2: 0.1}, first=2000)
    state, _ = loop(p, state, [3], {3: 0.5}, first=3000)
    assert sorted(state.tenants.ids.tolist()) == [2, 3]
    again = view(1, request=np.array([9]), tenant=np.array([1]))
    _, state = p.plan(again, state, 0.0, RNG)
    row = state.tenants.of([9])[0]
    new = state.acceptance.estimates.draft_hazard[row * 2 : row * 2 + 2]
    assert np.array_equal(new, p.start().acceptance.estimates.draft_hazard)
    assert not np.array_equal(new, first[:2])


def test_rows_are_bounded_by_what_is_remembered_or_in_flight_and_no_request_leaks():
    tenants, rng = Tenants(), np.random.default_rng(0)
    flying = []
    for number in range(2000):
        tenants, _ = tenants.admit([number], [int(rng.integers(0, 500))], 8)
        flying.append(number)
        if len(flying) > 20:
            tenants = tenants.without([flying.pop(int(rng.integers(0, 20)))])
        assert tenants.rows <= 8 + 21
        assert len(tenants.row) == len(flying)
        assert len(set(tenants.ids.tolist())) == tenants.rows
    assert tenants.of([1, *flying[:1]]).tolist()[0] == NO_TENANT


def test_what_tenants_taught_outlasts_a_restart_apart():
    p = planner()
    state, _ = loop(p, p.start(), [NORMAL, HOSTILE], {NORMAL: 0.9, HOSTILE: 0.1}, first=1)
    data = json.loads(json.dumps(p.save(state, 1.0)))
    assert [entry["tenant"] for entry in data["tenants"]] == [NORMAL, HOSTILE]
    back = p.load(data, 0.0, 0.0)
    np.testing.assert_allclose(
        back.acceptance.estimates.draft_hazard, state.acceptance.estimates.draft_hazard
    )
    np.testing.assert_allclose(
        back.acceptance.estimates.requests, state.acceptance.estimates.requests
    )
    few = planner(acceptance=AcceptanceConfig(most_tenants=1)).load(data, 0.0, 0.0)
    assert few.tenants.ids.tolist() == [HOSTILE]


# -- simulated


class _Lengths(Wrapper):
    """A policy, and the lengths that it planned by request."""

    def __init__(self, policy):
        super().__init__(policy)
        self.planned = []

    def plan(self, view, state, now, rng):
        plan, after = super().plan(view, state, now, rng)
        self.planned += zip(view.request.tolist(), plan.length.tolist(), strict=True)
        return plan, after


def simulated(arm, other, seed, requests=160, in_flight=8):
    """Return the mean planned length and the latency of one tenant's requests along with
    another's, whose tokens are never (0.02) or always (0.98) accepted; after what is learnt first.
    """
    deployment = llama_8b_h100()
    kinds = [
        Category(name, 1.0, 200, 120, dict.fromkeys(deployment.drafts, hazard))
        for name, hazard in (("normal", 0.7), ("hostile", other))
    ]
    mix = Mix("tenants", tuple(kinds), spread=0.3, draft_spread=0.2, length_spread=0.3)
    nothing = Drift.none(2, len(deployment.drafts))
    work = draw(mix, deployment.drafts, backlog(requests), seed, deployment.k_max, 1.0, nothing)
    kind = work.acceptance.category
    work = replace(work, tenant=kind)
    policy = _Lengths(make_policy(arm, deployment, mix, work, deployment.latency, seed))
    run = simulate_closed(deployment, work, policy, seed, in_flight)
    late = np.arange(requests) > requests // 4
    request, length = np.array(policy.planned).T
    mine = (kind == 0) & late
    return length[mine[request]].mean(), run.latency_s[mine].mean()


@pytest.mark.slow
@pytest.mark.parametrize("other", [0.02, 0.98])
def test_with_a_hostile_tenant_plans_are_as_with_true_acceptance(other):
    """The oracle knows the truth and learns nothing, not even what a node costs: what remains is
    the load, and that a tenant learns from its own texts alone (2.3 planned tokens instead of 2.9,
    7 % of the latency, where nothing of the other's is accepted).
    """
    pairs = [
        (simulated("adaptive", other, seed), simulated("oracle", other, seed))
        for seed in (1, 2, 3, 4)
    ]
    length, latency_s = np.array(pairs).mean(0).T
    assert length[0] == pytest.approx(length[1], rel=0.25)
    assert latency_s[0] == pytest.approx(latency_s[1], rel=0.1)


def test_rows_of_two_tenants_in_one_plan_have_each_its_own_charge():
    p = planner(latency((0.05, 0.15)), explore_share=0.0)
    seen = view(2, request=np.array([1, 2]), tenant=np.array([NORMAL, HOSTILE]))
    _, state = p.plan(seen, p.start(), 0.0, RNG)
    four = np.repeat(2, 400), np.zeros(400, np.bool_), np.full(400, 0.9), np.full(400, True)
    rows, depth = np.repeat(np.arange(100), 4), np.zeros(400, np.int64)
    state.calibration = state.calibration.learnt(*four, rows, depth)
    problem, _ = p.problem(seen, state)
    assert problem.gain[0, :, 1] == pytest.approx(problem.gain[0, :, 0])
    assert problem.nodes[0, 0, 1] > problem.nodes[0, 0, 0]
    assert problem.nodes[0, 1, 1] == problem.nodes[0, 1, 0]
