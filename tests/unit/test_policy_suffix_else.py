"""A free draft where it matches enough, another draft elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from policy import LatencyCurve, LatencyModel, SuffixElse
from policy.baselines import BASELINES, BaselineSettings
from policy.evidence import MATCH_EDGES, bin_of_match
from tests.fakes import policies as fakes
from tests.fakes.policies import RNG

DRAFTS = ("suffix", "eagle", "small")
SECONDS = (1e-5, 1e-3, 1e-4)
EDGES = MATCH_EDGES
LATENCY = LatencyModel(
    LatencyCurve(np.full(9, 0.01), 0.0),
    tuple(LatencyCurve(np.full(9, s), 0.0) for s in SECONDS),
)
SETTINGS = BaselineSettings(DRAFTS, LATENCY, draft="eagle", length=3, free=("suffix",))


def view(matches, ceiling=8, agree=False):
    """Return a view of rows whose suffix matches this many tokens; None: it shows no evidence."""
    rows = len(matches)
    ceilings = np.full((rows, 3), ceiling)
    ceilings[[match == 0 for match in matches], 0] = 0
    shown = np.zeros((rows, 3), np.int64)
    shown[:, 0] = [bin_of_match(match or 0, agree) for match in matches]
    return fakes.view(rows, DRAFTS, k=ceilings, evidence=shown)


def choices(policy, seen):
    plan, state = policy.plan(seen, policy.start(), 0.0, RNG)
    assert state is None
    names = [*DRAFTS, "none"]
    return [(names[d], k) for d, k in zip(plan.draft.tolist(), plan.length.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("options", "match", "chosen"),
    [
        ({}, 0, ("eagle", 3)),
        ({}, EDGES[1], ("eagle", 3)),
        ({}, EDGES[2] - 1, ("eagle", 3)),  # the least of its class may be under 4
        ({}, EDGES[2], ("suffix", EDGES[2])),
        ({}, EDGES[3] - 1, ("suffix", EDGES[2])),  # the least of its class
        ({}, 40, ("suffix", 8)),  # within the ceiling
        ({"least": 1}, 1, ("suffix", 1)),
        ({"least": 12}, 11, ("eagle", 3)),
        ({"least": 12}, 12, ("suffix", 8)),
        ({"own": 2}, 12, ("suffix", 2)),
        ({"own": 7}, EDGES[2], ("suffix", 7)),
        ({"least": 1000}, EDGES[-1] - 1, ("eagle", 3)),
        ({"least": 1000}, EDGES[-1], ("suffix", 8)),
        ({}, None, ("suffix", 8)),  # it can propose, and shows nothing
    ],
)
def test_a_row_gets_the_free_draft_from_its_least_match_on_and_else_the_other(
    options, match, chosen
):
    made = BASELINES["suffix-else-eagle"].make(replace(SETTINGS, options=options))
    assert choices(made, view([match])) == [chosen]
    assert choices(made, view([match], agree=True)) == [chosen]


def test_rows_choose_each_by_itself():
    seen = view([0, 12, 2, None])
    assert choices(SuffixElse(SETTINGS), seen) == [
        ("eagle", 3),
        ("suffix", 8),
        ("eagle", 3),
        ("suffix", 8),
    ]


def test_without_evidence_the_free_draft_matches_where_it_can_propose():
    seen = replace(view([0, 1]), evidence=None)
    assert choices(SuffixElse(SETTINGS), seen) == [("eagle", 3), ("suffix", 8)]


def test_where_it_is_not_known_what_is_free_it_is_the_draft_that_takes_least_time():
    assert SuffixElse(replace(SETTINGS, free=None)).free == "suffix"
    assert SuffixElse(replace(SETTINGS, free=None, draft="suffix")).free == "small"


@pytest.mark.parametrize("free", [(), ("eagle",)])
def test_without_a_free_draft_the_other_proposes_for_all(free):
    assert choices(SuffixElse(replace(SETTINGS, free=free)), view([12, 0])) == [("eagle", 3)] * 2


def test_a_draft_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'x'"):
        SuffixElse(replace(SETTINGS, draft="x"))
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'eagle'"):
        SuffixElse(SETTINGS).plan(fakes.view(1, ("suffix",)), None, 0.0, RNG)


def test_an_empty_batch_is_planned():
    assert choices(SuffixElse(SETTINGS), view([])) == []
