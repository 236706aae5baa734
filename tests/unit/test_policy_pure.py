"""Every baseline is pure functions of view, state, now and rng, within every row's ceilings."""

import pickle

import numpy as np
import pytest

from bench.baselines import BASELINES
from policy.baselines import BaselineSettings
from policy.plan import DraftNodes, FreeChains, StepNodes
from tests.fakes import policies as fakes

DRAFTS = ("suffix", "small", "large")
SETTINGS = BaselineSettings(
    DRAFTS,
    fakes.latency((1e-4, 0.1, 0.25)),
    draft="small",
    length=3,
    schedule={2: 4, 8: 2},
)


def steps(policy, seed, count=60):
    """Yield what a policy is called with, and what it answers: requests come and go, drafts match
    or do not, and the free draft is scored.
    """
    rng, state, own = np.random.default_rng(seed), policy.start(), np.random.default_rng(0)
    for step in range(count):
        rows = int(rng.integers(0, 10))
        request = np.arange(rows) + 3 * (step // 10)
        ceiling = rng.integers(0, 6, (rows, 3))
        evidence = np.where(ceiling > 0, rng.integers(0, 12, (rows, 3)), 0)
        changes = {"request": request, "evidence": evidence}
        seen = fakes.view(rows, DRAFTS, k=ceiling, **changes)
        before = pickle.dumps(state)
        plan, planned = policy.plan(seen, state, float(step), own)
        row = np.arange(rows).repeat(plan.length)
        claims, none = rng.random(len(row)), np.zeros(len(row), np.bool_)
        drafted = DraftNodes(row, plan.draft[row], claims, none)
        nodes = policy.trim(seen, plan, drafted, planned) if rows else plan.length
        yield before, state, seen, plan, nodes, planned
        at = pickle.dumps(planned)
        asked = np.flatnonzero(ceiling[:, 0])
        scored = ceiling[asked, 0]
        free = FreeChains(request[asked], 0 * asked, rng.integers(0, scored + 1), scored)
        taught = StepNodes(row, claims, none, rng.random(len(row)) < claims)
        done = fakes.outcome(
            seen,
            plan,
            rng.integers(0, 5, rows),
            float(rng.random() + 1),
            free=free,
            nodes=taught,
            finished=request[: int(rng.integers(0, 2))],
        )
        state = policy.observe(done, planned, float(step))
        assert pickle.dumps(planned) == at, "observe changed the state in place"


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_changes_no_state_in_place_and_keeps_within_the_ceilings(name):
    for before, state, seen, plan, nodes, _ in steps(BASELINES[name].make(SETTINGS), 1):
        assert pickle.dumps(state) == before, "plan or trim changed the state in place"
        assert len(plan.draft) == len(plan.length) == len(nodes) == len(seen)
        used = np.flatnonzero(plan.draft >= 0)
        assert (plan.length[used] <= seen.ceiling[used, plan.draft[used]]).all()
        assert ((plan.length > 0) == (plan.draft >= 0)).all()
        assert ((nodes >= 0) & (nodes <= plan.length)).all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_decides_the_same_from_the_same(name):
    def decided(seed):
        played = steps(BASELINES[name].make(SETTINGS), seed)
        return [(p.draft.tolist(), p.length.tolist(), n.tolist()) for _, _, _, p, n, _ in played]

    assert decided(2) == decided(2)
