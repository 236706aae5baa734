"""A top-p that decays along the output and is reset by a token, inside verified runs: by enumeration, and against plain decoding."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from backend.request import SamplingParams
from tests.contract import checks
from tests.contract.scenarios import SCRIPT, TREE_SCRIPT, Ask, Scenario, serve

pytestmark = pytest.mark.slow

DECAYING = SamplingParams(1.0, top_p=0.95, top_p_decay=0.6, top_p_min=0.2, top_p_reset_id=2)
ASKS = tuple(Ask(n % 6, 16, n // 4, sampling=replace(DECAYING, temperature=1.5, seed=n, coupled=True)) for n in range(8))


@pytest.mark.parametrize("coupled", [False, True], ids=["sampled", "plan-invariant"])
def test_the_first_three_tokens_follow_the_law_of_a_top_p_that_decays(coupled):
    checks.texts_follow_the_target_s_law(replace(DECAYING, coupled=coupled))


def test_a_decay_that_is_not_applied_would_be_noticed():
    with patch.object(SamplingParams, "behind", lambda self, output: self), pytest.raises(AssertionError, match="no probability"):
        checks.texts_follow_the_target_s_law(DECAYING)


@pytest.mark.parametrize("script", [SCRIPT, TREE_SCRIPT], ids=["chains", "trees"])
def test_texts_are_those_of_plain_decoding(script):
    scenario = Scenario(ASKS, script, max_active=6)
    deployment, sessions = serve(scenario)
    checks.texts_are(scenario, sessions)
    assert sum(int(outcome.accepted.sum()) for outcome in deployment.policy.outcomes) > 10
