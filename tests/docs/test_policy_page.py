"""The example in numbers on the page about the policy is run as it stands."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "policy.md"


def test_the_step_in_numbers_is_what_the_policy_computes():
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.attempted > 12
    assert found.failed == 0
