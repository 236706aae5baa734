"""Every row drafts the same; of all tokens the most profitable are verified."""

import numpy as np
import pytest

from bench.baselines.verification import AdaptiveVerification
from policy import LatencyCurve, LatencyModel, StepNodes
from policy.plan import DraftNodes
from tests.fakes import policies as fakes
from tests.fakes.policies import RNG

DRAFTS = ("a", "b")


def model(pass_s, token_s, draft_s=0.0, other_s=(0.0, 0.0), **target):
    """Passes of ``pass_s`` and ``token_s`` more a token; a draft's forward takes ``draft_s``."""
    base = pass_s + token_s * np.arange(600)
    draft = LatencyCurve(np.full(9, draft_s), 0.0)
    return LatencyModel(LatencyCurve(base, token_s, **target), (draft, draft), *other_s)


def drafted(*confidences):
    """The rows' proposals, by the confidences of the paths to their nodes."""
    row = np.repeat(np.arange(len(confidences)), [len(c) for c in confidences])
    flat = np.array([c for paths in confidences for c in paths], float)
    return DraftNodes(row, np.zeros(len(row), np.int64), flat, np.zeros(len(row), np.bool_))


def verified(latency, proposed, rows, length=3, state=None, **changes):
    policy = AdaptiveVerification(DRAFTS, latency, 8, draft="a", length=length)
    seen = fakes.view(rows, DRAFTS, **changes)
    plan, state = policy.plan(seen, state or policy.start(), 0.0, RNG)
    return policy.trim(seen, plan, proposed, state).tolist()


def test_every_row_drafts_the_same_length_within_its_ceiling():
    policy = AdaptiveVerification(DRAFTS, model(1.0, 0.1), 8, draft="b", length=5)
    seen = fakes.view(3, DRAFTS, k=[[8, 8], [8, 2], [8, 0]])
    plan, _ = policy.plan(seen, policy.start(), 0.0, RNG)
    assert plan.draft.tolist() == [1, 1, -1]
    assert plan.length.tolist() == [5, 2, 0]


@pytest.mark.parametrize(
    ("token_s", "nodes"),
    [
        (0.0, [3, 3]),  # what costs nothing is verified
        (0.2, [2, 0]),  # 2 + 0.9 + 0.81 over 1.8
        (9.0, [0, 0]),
    ],
)
def test_the_budget_has_the_most_expected_tokens_a_second(token_s, nodes):
    proposed = drafted([0.9, 0.81, 0.4], [0.3, 0.2, 0.1])
    assert verified(model(1.0, token_s), proposed, 2) == nodes


def test_a_confident_row_s_last_token_outranks_a_doubtful_row_s_first():
    proposed = drafted([0.2, 0.1, 0.05], [0.95, 0.9, 0.86])
    assert verified(model(1.0, 0.1), proposed, 2) == [0, 3]


def test_all_totals_are_looked_at_not_only_up_to_the_first_that_is_no_better():
    stairs = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])  # the second token is dear, the next are free
    latency = LatencyModel(LatencyCurve(stairs, 0.0), model(1.0, 0.0).drafts)
    assert verified(latency, drafted([0.9, 0.8, 0.7]), 1) == [3]


def test_dear_drafting_is_spent_and_makes_verifying_more_pay():
    proposed = drafted([0.5, 0.25, 0.12])
    cheap = verified(model(1.0, 1.5, draft_s=0.0), proposed, 1)
    dear = verified(model(1.0, 1.5, draft_s=50.0), proposed, 1)
    assert (cheap, dear) == ([0], [3])


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ({"row_s": 3.0}, {}),
        ({"other_s": (3.0, 0.0)}, {}),
        ({"other_s": (0.0, 3.0)}, {}),
        ({"context_s": 0.03}, {"context": 100}),
        ({}, {"prefill_tokens": 30}),
    ],
)
def test_what_the_step_takes_anyway_counts(target, changes):
    proposed = drafted([0.5, 0.4, 0.3])
    alone = verified(model(0.5, 0.5), proposed, 1)
    assert sum(verified(model(0.5, 0.5, **target), proposed, 1, **changes)) > sum(alone)


def test_the_context_read_for_every_node_counts():
    proposed = drafted([0.9, 0.8, 0.7])
    assert verified(model(1.0, 0.0), proposed, 1) == [3]
    assert verified(model(1.0, 0.0, node_context_s=0.1), proposed, 1) == [0]


def outcome(seen, plan, claims, accepted):
    """An outcome whose nodes claimed ``claims`` [q], by row 0."""
    q = len(claims)
    nodes = StepNodes(
        np.zeros(q, np.int64), np.array(claims), np.zeros(q, np.bool_), np.array(accepted)
    )
    return fakes.outcome(seen, plan, 0, nodes=nodes)


def test_claims_that_do_not_hold_are_verified_no_more():
    latency = model(1.0, 0.6)
    policy = AdaptiveVerification(DRAFTS, latency, 8, draft="a", length=3)
    state, seen = policy.start(), fakes.view(1, DRAFTS)
    before = verified(latency, drafted([0.9, 0.9, 0.9]), 1, state=state)
    for _ in range(60):
        plan, state = policy.plan(seen, state, 0.0, RNG)
        state = policy.observe(outcome(seen, plan, [0.9], [False]), state, 0.0)
    assert (before, verified(latency, drafted([0.9, 0.9, 0.9]), 1, state=state)) == ([3], [0])


def test_a_step_without_speculation_teaches_nothing():
    policy = AdaptiveVerification(DRAFTS, model(1.0, 0.3), 8, draft="a", length=3)
    seen, state = fakes.view(1, DRAFTS, k=0), policy.start()
    plan, state = policy.plan(seen, state, 0.0, RNG)
    after = policy.observe(outcome(seen, plan, [0.9], [True]), state, 0.0)
    assert not after.calibration.counts.nodes.any()


def test_an_empty_batch_and_an_unknown_draft():
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'x'"):
        AdaptiveVerification(DRAFTS, model(1.0, 0.1), 8, draft="x", length=3)
    assert verified(model(1.0, 0.1), drafted(), 0) == []
