import json

import numpy as np
import pytest

from policy import LatencyModel, LatencyTable
from tests.fakes.policies import DRAFTS, planner, taught


def saved():
    """Learned state of the drafts small and large, as it is in a file."""
    data = planner().save(taught(planner()), 59.0)
    data["target"].update(factor=1.1, overhead_s=[0.01, 0.02])
    data["drafts"]["small"]["factor"], data["drafts"]["large"]["factor"] = 1.3, 1.4
    data["age_s"] = 0.0
    return json.loads(json.dumps(data))


def planner_of(drafts):
    tables = {name: LatencyTable.synthetic(name, {1: 0.1, 64: 0.2}) for name in drafts}
    target = LatencyTable.synthetic("target", {1: 1.0, 64: 2.0})
    return planner(LatencyModel.from_tables(target, tables), drafts=drafts)


def test_what_was_saved_is_saved_again_the_same():
    p = planner()
    assert p.save(p.load(saved(), 5.0, 0.0), 5.0) == saved()


@pytest.mark.parametrize(
    "after",
    [("large", "small"), ("new", "large"), ("small",), ("a", "b", "small", "large"), ("new",)],
)
def test_what_is_known_of_a_draft_goes_with_its_name(after):
    data, other = saved(), planner_of(after)
    again = other.save(other.load(data, 5.0, 0.0), 5.0)
    assert list(again["drafts"]) == list(after)
    assert again["target"] == data["target"]
    fresh = other.start()
    for column, name in enumerate(after):
        known = again["tenants"][0]["drafts"][name]
        times = again["drafts"][name]
        if name in DRAFTS:
            assert known == data["tenants"][0]["drafts"][name]
            assert times == data["drafts"][name]
        else:
            assert not np.any(known["reached"])
            assert not np.any(known["nodes"])
            assert times["factor"] == 1.0
            assert known["variance"] == fresh.acceptance.estimates.variance[column]


def test_a_draft_s_hazards_are_the_same_with_other_drafts():
    before = planner().load(saved(), 5.0, 0.0).acceptance.estimates.draft_hazard
    after = planner_of(("new", "large")).load(saved(), 5.0, 0.0).acceptance.estimates.draft_hazard
    assert np.array_equal(after[1], before[1])
