from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.plan import NO_DRAFT
from policy.simulation.arms import make_policy
from policy.simulation.fleet import least_outstanding, simulate
from policy.simulation.presets import MIXES, llama_8b_h100
from policy.simulation.workload import bursty, draw

ARMS = [
    "none",
    "fixed:eagle:8",
    "schedule:1b",
    "ema:eagle",
    "smartspec:1b",
    "bench.baselines.spin.SpinSelection:length=3",
    "adaptive",
    "oracle",
]


class Watched:
    """A policy whose plans are checked against what it was shown."""

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def plan(self, view, state, now, rng):
        plan, state = self.policy.plan(view, state, now, rng)
        used = plan.length > 0
        assert (plan.length[used] <= view.ceiling[used, plan.draft[used]]).all()
        assert ((plan.draft == NO_DRAFT) == ~used).all()
        assert (view.catchup >= 0).all()
        assert (view.remaining >= 1).all()
        assert len(set(view.request.tolist())) == len(view)
        return plan, state

    def observe(self, outcome, state, now):
        assert (outcome.rows.accepted <= outcome.rows.scored).all()
        assert (outcome.rows.scored <= outcome.rows.length).all()
        assert (outcome.rows.emitted >= 1).all()
        assert (outcome.rows.emitted <= outcome.rows.accepted + 1).all()
        return self.policy.observe(outcome, state, now)


def in_turn(outstanding, request):
    return request % len(outstanding)


@pytest.mark.medium
@settings(max_examples=25)
@given(
    arm=st.sampled_from(ARMS),
    mix=st.sampled_from(sorted(MIXES)),
    requests=st.integers(1, 10),
    rate_hz=st.floats(1.0, 500.0),
    variation=st.floats(0.5, 4.0),
    max_active=st.integers(1, 6),
    chunk=st.integers(64, 3000),
    spare_blocks=st.integers(0, 60),
    replicas=st.integers(1, 3),
    router=st.sampled_from([in_turn, least_outstanding]),
    seed=st.integers(0, 1000),
)
def test_whatever_is_simulated_every_token_is_emitted_once_and_time_goes_forward(
    arm, mix, requests, rate_hz, variation, max_active, chunk, spare_blocks, replicas, router, seed
):
    deployment = replace(llama_8b_h100(), max_active=max_active, prefill_chunk_tokens=chunk)
    workload = draw(
        MIXES[mix], deployment.drafts, bursty(requests, rate_hz, variation, seed), seed, 8, 1.0
    )
    shorter = np.minimum(workload.output_tokens, 40)
    workload = replace(workload, output_tokens=shorter, max_tokens=shorter + 5)
    largest = int((workload.prompt_tokens + workload.max_tokens).max()) + 9
    deployment = replace(deployment, kv_tokens=16 * (-(-largest // 16) + spare_blocks))
    policies = []

    def policy():
        policies.append(
            Watched(make_policy(arm, deployment, MIXES[mix], workload, deployment.latency, seed))
        )
        return policies[-1]

    run = simulate(deployment, workload, policy, seed, replicas, router)
    assert np.isfinite(run.latency_s).all()
    assert (run.latency_s >= run.first_token_s).all()
    assert (run.first_token_s > 0).all()
    assert sum(step.emitted for step in run.steps) == shorter.sum()
    assert sum(step.prefill_tokens for step in run.steps) >= workload.prompt_tokens.sum()
    if not run.preemptions:
        assert sum(step.prefill_tokens for step in run.steps) == workload.prompt_tokens.sum()
    assert max(step.rows for step in run.steps) <= max_active
    assert max(step.prefill_tokens for step in run.steps) <= chunk
    assert len(policies) == replicas
