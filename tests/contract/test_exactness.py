"""The exactness suite on the engine as it is; its laws once more with all drafts in turn, more rounds and every option."""

from dataclasses import replace

import pytest

from tests.contract import checks, cohort_checks, padded_checks, tree_checks

SUITES = checks, tree_checks, padded_checks, cohort_checks
SLOW = {
    checks.texts_sampled_with_a_reduced_law_follow_the_target_s,
    checks.texts_sampled_with_a_shortlist_follow_the_target_s_law,
    checks.texts_sampled_with_lookup_follow_the_target_s_law,
    *(check for check in (*tree_checks.SUITE, *cohort_checks.SUITE) if "law" in check.__name__),
}
"""Laws by many draws; those of one draft and of plan-invariant texts stay in the everyday suite."""
CHECKS = [pytest.param(check, id=check.__name__, marks=[pytest.mark.slow] * (check in SLOW)) for suite in SUITES for check in suite.SUITE]
LAWS = {"wide": checks.WIDE, "sharp": checks.SHARP, "options": checks.OPTIONS}


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_that(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True], ids=["sampled", "plan-invariant"])
@pytest.mark.parametrize("law", LAWS)
def test_the_first_three_tokens_follow_the_target_s_law_whatever_is_planned(law, coupled):
    checks.texts_follow_the_target_s_law(replace(LAWS[law], coupled=coupled), rounds=2_000)
