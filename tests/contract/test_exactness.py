"""The exactness suite on the engine as it is; its laws once more with all drafts in turn, more rounds and every option."""

from dataclasses import replace

import pytest

from tests.contract import checks, cohort_checks, padded_checks, tree_checks

LAWS = {"wide": checks.WIDE, "sharp": checks.SHARP, "options": checks.OPTIONS}


@pytest.mark.parametrize(
    "check", [*checks.SUITE, *tree_checks.SUITE, *padded_checks.SUITE, *cohort_checks.SUITE], ids=lambda check: check.__name__
)
def test_it_holds_that(check):
    check()


@pytest.mark.parametrize("coupled", [False, True], ids=["sampled", "plan-invariant"])
@pytest.mark.parametrize("law", LAWS)
def test_the_first_three_tokens_follow_the_target_s_law_whatever_is_planned(law, coupled):
    checks.texts_follow_the_target_s_law(replace(LAWS[law], coupled=coupled), rounds=2_000)
