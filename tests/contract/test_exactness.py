"""The exactness suite on the engine as it is."""

import pytest

from tests.contract import checks


@pytest.mark.parametrize("check", checks.SUITE, ids=lambda check: check.__name__)
def test_it_holds_that(check):
    check()
