"""The exactness suite can fail: every deliberate fault is noticed by the check that is there for
it.
"""

import pytest

from tests.contract.mutants import MUTANTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_noticed(name, monkeypatch):
    mutant = MUTANTS[name]
    mutant.plant(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.killer()
