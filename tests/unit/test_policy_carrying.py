import json

import numpy as np
import pytest

from policy import AcceptanceConfig, LatencyModel, LatencyTable, carried
from tests.unit.test_policy_learned import taught
from tests.unit.test_policy_planner import DRAFTS, latency, planner


def saved():
    """What was learnt of the drafts small and large, as it is in a file, with a group."""
    data = planner().save(taught(planner()), 59.0)
    data["groups"] = [{"group": 7, "accepted": [[1.0] * 8, [0.5] * 8], "reached": [[3.0] * 8] * 2}]
    data["correction"] = [1.1, 1.2, 1.3, 1.4]
    return json.loads(json.dumps(data))


def test_what_is_known_of_the_same_drafts_stays_as_it_is():
    data = saved()
    assert carried(data, DRAFTS, DRAFTS) == data


def test_what_is_known_of_a_draft_goes_with_its_name():
    data, swapped = saved(), carried(saved(), DRAFTS, DRAFTS[::-1])
    assert swapped != data
    assert carried(swapped, DRAFTS[::-1], DRAFTS) == data
    assert np.array_equal(swapped["draft_reached"][0], data["draft_reached"][1])
    assert swapped["correction"] == [1.1, 1.2, 1.4, 1.3]
    assert swapped["groups"][0]["accepted"] == [[0.5] * 8, [1.0] * 8]


def test_of_a_new_draft_nothing_is_known():
    found = carried(saved(), DRAFTS, ("new", *DRAFTS))
    assert not np.array(found["draft_reached"])[0].any()
    assert found["correction"] == [1.1, 1.2, 1.0, 1.3, 1.4]
    unknown = AcceptanceConfig().request_variance
    assert found["variance"] == [unknown, *saved()["variance"]]
    assert found["groups"][0]["reached"][0] == [0] * 8


@pytest.mark.parametrize("after", [("new", "large"), ("small",), ("a", "b", "small", "large")])
def test_a_planner_of_other_drafts_takes_it_up(after):
    tables = {name: LatencyTable.synthetic(name, {1: 0.1, 64: 0.2}) for name in after}
    other = planner(LatencyModel.from_tables(LatencyTable.synthetic("target", {1: 1.0, 64: 2.0}), tables), drafts=after)
    data = saved()
    state = other.load(carried(data, DRAFTS, after), 5.0, 0.0)
    assert state.correction.tolist()[:2] == [1.1, 1.2]
    reached = np.array(data["draft_reached"])
    for column, name in enumerate(after):
        known = reached[DRAFTS.index(name)] if name in DRAFTS else np.zeros_like(reached[0])
        np.testing.assert_allclose(state.acceptance.draft_reached[column], known, rtol=1e-6)
        if name in DRAFTS:
            before = planner(latency()).load(data, 5.0, 0.0).acceptance
            known = before.draft_hazard[DRAFTS.index(name)]
            assert np.allclose(state.acceptance.draft_hazard[column], known)
