"""A stationary batch's plan stays, up to what probes and luck change."""

import numpy as np
import pytest

from tests.fakes.policies import latency, outcome, planner, view


def changes(rows, hazard, steps=400):
    """Draft changes and tokens of length changed, per request and step, over the second half of the
    steps of a batch that goes on.

    Request i accepts draft d's tokens at rate hazard[i % types][d]; a draft that it leaves has to
    catch up.
    """
    made, rng = planner(latency((0.05, 0.15), token_s=0.01)), np.random.default_rng(0)
    state, catchup, plans = made.start(), np.full((rows, 2), 40), []
    for step in range(steps):
        seen = view(rows, catchup=catchup)
        plan, state = made.plan(seen, state, 0.02 * step, rng)
        rate = np.array(
            [hazard[i % len(hazard)][d] if d >= 0 else 0.0 for i, d in enumerate(plan.draft)]
        )
        matched = (rng.random((rows, 8)) < rate[:, None]) & (np.arange(8) < plan.length[:, None])
        accepted = np.cumprod(matched, axis=1).sum(1)
        state = made.observe(outcome(seen, plan, accepted, plan.predicted_s), state, 0.02 * step)
        catchup = np.where(plan.draft[:, None] == np.arange(2), 1, catchup + accepted[:, None] + 1)
        plans.append((plan.draft, plan.length))
    drafts, lengths = np.array(plans)[steps // 2 :].transpose(1, 0, 2)
    return float((np.diff(drafts, axis=0) != 0).mean()), float(
        np.abs(np.diff(lengths, axis=0)).mean()
    )


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(
    "hazard",
    [[[0.6, 0.8]], [[0.75, 0.8]], [[0.9, 0.9], [0.2, 0.2]]],
    ids=["clear", "close", "mixed"],
)
def test_a_steady_request_changes_its_draft_at_most_every_tenth_step_and_its_length_by_little(
    rows, hazard
):
    draft, length = changes(rows, hazard)
    assert draft < 0.1
    assert length < 0.5
