"""No learnt factor locks a draft out for good: each is driven to its worst, and comes back."""

from collections.abc import Iterator

import numpy as np
import pytest

from policy.plan import DraftNodes, StepNodes
from tests.fakes.policies import latency, outcome, planner, view

RATE = 0.8
MOST_STEPS = 800


def verified_nodes(seen, plan, p, state, claim):
    """The nodes that the trim leaves of chains whose tokens are all claimed alike."""
    row = np.arange(len(seen)).repeat(plan.length)
    depth = np.arange(len(row)) - np.searchsorted(row, row)

    drafted = DraftNodes(row, plan.draft[row], claim ** (1.0 + depth), np.zeros(len(row), np.bool_))
    return np.minimum(p.trim(seen, plan, drafted, state), plan.length), drafted


def lengths(p, rows, *, worst: str = "", bad_steps: int = 0, steps: int = MOST_STEPS):
    """Yield the verified tokens of each step that follows ``bad_steps`` in which a factor is
    driven to its worst, for requests of 40 steps.
    """
    rng, state, ids = np.random.default_rng(2), p.start(), np.arange(rows)
    none = np.zeros(0, np.int64)
    for step in range(bad_steps + steps):
        bad = worst if step < bad_steps else ""
        seen = view(rows, ("small",), request=ids, remaining=np.full(rows, 10**6))
        plan, state = p.plan(seen, state, 0.1 * step, rng)
        verified, drafted = verified_nodes(seen, plan, p, state, 0.99)
        right_tokens = np.cumprod(rng.random((rows, 8)) < RATE, axis=1).sum(1)
        if bad == "acceptance":
            right_tokens[:] = 0
        accepted = np.minimum(right_tokens, verified)
        draft_s, verify_s = 0.1 * plan.length.max(), p.latency.target.at(rows + verified.sum())
        if bad == "time":
            draft_s *= 8
        depth = np.arange(len(drafted.row)) - np.searchsorted(drafted.row, drafted.row)
        known = depth <= accepted[drafted.row]
        right = depth < right_tokens[drafted.row]
        if bad == "claims":
            right = np.zeros_like(right)
        nodes = StepNodes(
            drafted.row[known], drafted.confidence[known], drafted.sampled[known], right[known]
        )
        over = ids if step % 40 == 39 else none
        parts_s = {"verify": float(verify_s), "draft:small": float(draft_s)}
        done = outcome(
            seen, plan, accepted, sum(parts_s.values()), parts_s=parts_s, nodes=nodes, finished=over
        )
        done.rows.verified = verified * 20 if bad == "nodes" else verified
        done.rows.scored = np.minimum(accepted + 1, verified)
        state = p.observe(done, state, 0.1 * step)
        if len(over):
            ids = ids + rows
        if step >= bad_steps:
            yield int(verified.sum())


def made():
    return planner(latency((0.1,), token_s=0.02), ("small",))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("bad_steps", [1, 100])
@pytest.mark.parametrize("worst", ["acceptance", "time", "claims", "nodes"])
def test_what_a_bad_phase_has_taught_is_unlearnt(worst, rows, bad_steps):
    usual = np.mean([*lengths(made(), rows)][-100:])
    after: Iterator[int] = lengths(made(), rows, worst=worst, bad_steps=bad_steps)
    assert np.mean([*after][-100:]) > 0.75 * usual > 0
