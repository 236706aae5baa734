"""The exactness suite on the engine as it is, and the distribution of its texts."""

import pytest

from backend.sequence import BLOCK_TOKENS
from tests.contract import checks
from tests.contract.exact_cases import CHECKS, SAMPLINGS, SCENARIOS
from tests.contract.scenarios import (
    ALIKE,
    CRAMPED,
    CROWDED,
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_exact(name):
    scenario, properties = SCENARIOS[name]
    checks.exact(scenario, *properties)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_holds_that(check):
    check()


def test_kv_is_shared_and_requests_are_pre_empted():
    """If nothing was, the scenarios that are there for it would show nothing."""
    shared = checks.exact(ALIKE).deployment.counters()
    assert shared["spindle_kv_reused_tokens_total",] >= 4 * BLOCK_TOKENS
    assert ("spindle_preemptions_total",) not in shared
    for scenario in (CRAMPED, CROWDED):
        assert checks.exact(scenario).deployment.counters()["spindle_preemptions_total",] > 0


def test_a_text_follows_the_target_s_distribution():
    checks.texts_follow_the_target_s_distribution(checks.SHARP, ["other"], rounds=600)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_first_three_tokens_follow_the_target_s_distribution_whatever_is_planned(sampling):
    checks.texts_follow_the_target_s_distribution(SAMPLINGS[sampling], rounds=2_000)


@pytest.mark.slow
@pytest.mark.parametrize("draft", checks.SAMPLED_DRAFTS)
def test_each_draft_leaves_the_target_s_distribution(draft):
    checks.texts_follow_the_target_s_distribution(checks.WIDE, [draft])
