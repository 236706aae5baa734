"""The exactness suite on the engine as it is, and the law of its texts."""

from dataclasses import replace

import pytest

from tests.contract import checks
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, MIXED

SETTLED = (*checks.ALL, checks.one_token_is_unseen)
SCENARIOS = {
    "busy": (BUSY, SETTLED),
    "options": (MIXED, SETTLED),
    "chains only": (replace(MIXED, nodes=0), SETTLED),
    "plain": (replace(MIXED, script=((-1, 0),)), SETTLED),
    "oracle": (replace(MIXED, script=((6, 4),)), SETTLED),
    "alike": (ALIKE, checks.ALL),
    "alike in a small pool": (replace(ALIKE, kv_blocks=8), checks.ALL),
    "pre-empted": (CRAMPED, checks.ALL),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_exact(name):
    scenario, properties = SCENARIOS[name]
    checks.exact(scenario, *properties)
