"""The exactness suite with two submissions in flight, on the fake engine with a device of its own.

The engine itself holds its KV against the text of every turn (``FakeEngine``), in place of
``checks.kv_is_fresh``.
"""

import pytest

from tests.contract import checks
from tests.contract.ahead import serve_ahead
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED
from tests.contract.test_exactness import SCENARIOS, SETTLED

ENDS = (*checks.ENDS, checks.blocks_are_of_one_text)


@pytest.fixture(autouse=True)
def _ahead(monkeypatch):
    serve_ahead(monkeypatch)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_exact(name):
    scenario, properties = SCENARIOS[name]
    settled = (checks.one_token_is_unseen,) if properties == SETTLED else ()
    checks.exact(scenario, *ENDS, *settled)


@pytest.mark.parametrize(
    "check",
    [
        checks.tenants_share_nothing,
        checks.an_always_wrong_draft_gives_one_token_a_step,
        checks.an_oracle_gives_k_plus_one_tokens_a_step,
        checks.nothing_is_committed_beyond_an_end,
    ],
    ids=lambda check: check.__name__,
)
def test_it_holds_that(check):
    check()


def test_turns_follow_turns_in_flight_and_requests_are_pre_empted():
    """Where nothing was, the scenarios would show nothing."""
    served = checks.exact(BUSY)
    rows = [row for *_, row in served.deployment.drafting.recorded]
    assert served.deployment.target.following > 40
    assert sum(row.on_device is not None for row in rows) > 20
    assert sum(row.chosen is not None and row.on_device is None for row in rows) > 9
    assert sum(len(row.unused) for row in rows) > 20
    for scenario in (CRAMPED, CROWDED):
        assert checks.exact(scenario).deployment.counters()["spindle_preemptions_total",] > 0
    shared = checks.exact(ALIKE).deployment.counters()
    assert shared["spindle_kv_reused_tokens_total",] > 0


def test_a_text_follows_the_target_s_law():
    checks.texts_follow_the_target_s_law(checks.SHARP, ["other", "lookup"], rounds=600)
