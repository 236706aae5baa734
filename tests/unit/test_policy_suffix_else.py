"""A free draft where it matches enough, another draft elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from bench.baselines.suffix_else import SuffixElse
from policy import LatencyCurve, LatencyModel
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


def rule(draft="eagle", latency=LATENCY, **options):
    return SuffixElse(DRAFTS, latency, 8, draft=draft, length=3, **options)


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
    made = rule(**options)
    assert choices(made, view([match])) == [chosen]
    assert choices(made, view([match], agree=True)) == [chosen]


def test_rows_choose_each_by_itself():
    seen = view([0, 12, 2, None])
    assert choices(rule(), seen) == [
        ("eagle", 3),
        ("suffix", 8),
        ("eagle", 3),
        ("suffix", 8),
    ]


def test_without_evidence_the_free_draft_matches_where_it_can_propose():
    seen = replace(view([0, 1]), evidence=None)
    assert choices(rule(), seen) == [("eagle", 3), ("suffix", 8)]


def test_the_free_draft_is_the_one_that_takes_next_to_no_time():
    assert rule().free == "suffix"
    assert rule("suffix").free == "small"
    none_free = LatencyModel(LATENCY.target, (LATENCY.drafts[1],) * 3)
    assert choices(rule(latency=none_free), view([12, 0])) == [("eagle", 3)] * 2


def test_a_draft_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'x'"):
        rule("x")
    with pytest.raises(ValueError, match=r"draft must be one of .*, got 'eagle'"):
        rule().plan(fakes.view(1, ("suffix",)), None, 0.0, RNG)


def test_an_empty_batch_is_planned():
    assert choices(rule(), view([])) == []
