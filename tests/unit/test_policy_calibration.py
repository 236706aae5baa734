import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from policy import AdaptivePlanner, LatencyModel
from policy.learned import LearnedError
from policy.trim import BINS, EDGES, Calibration

CLAIMS = np.linspace(0, 1, 401)


def map_of(calibration, draft=0, sampled=False, claims=CLAIMS):
    return calibration.probability(
        np.full(len(claims), draft), np.full(len(claims), sampled), claims
    )


def taught(claimed, matched, nodes, *, draft=0, sampled=False, drafts=2, start=None, a_step=50):
    """A calibration after nodes of one confidence; a share of them ``matched``, in
    random order.
    """
    calibration, rng = start or Calibration.none(drafts), np.random.default_rng(7)
    for _ in range(0, nodes, a_step):
        true = rng.random(a_step) < matched
        columns = np.full(a_step, draft), np.full(a_step, sampled), np.full(a_step, claimed)
        calibration = calibration.learnt(*columns, true)
    return calibration


def test_a_new_draft_is_believed_as_it_speaks():
    for sampled in (False, True):
        assert map_of(Calibration.none(3), 2, sampled) == pytest.approx(CLAIMS)


@pytest.mark.parametrize(
    ("claimed", "matched"), [(0.9, 0.5), (0.3, 0.8), (0.005, 0.2), (1.0, 0.6), (0.65, 0.65)]
)
def test_what_a_claim_is_worth_is_learnt_for_its_draft_and_kind_of_row_alone(claimed, matched):
    calibration = taught(claimed, matched, 5000, draft=1, sampled=True)
    assert map_of(calibration, 1, True, np.array([claimed])) == pytest.approx(matched, abs=0.03)
    for draft, sampled in ((0, False), (0, True), (1, False)):
        assert map_of(calibration, draft, sampled) == pytest.approx(CLAIMS)


def test_a_few_nodes_move_a_claim_a_little():
    after = map_of(taught(0.9, 0.0, 4, a_step=4), claims=np.array([0.9]))
    assert 0.5 < after < 0.75


def test_a_draft_s_claims_are_distinguished_by_how_much_they_are_off():
    rng, calibration = np.random.default_rng(0), Calibration.none(1)
    zeros = np.zeros(64, np.int64)
    for _ in range(300):
        claimed = rng.random(64)
        matched = rng.random(64) < claimed**2
        calibration = calibration.learnt(zeros, zeros > 0, claimed, matched)
    assert map_of(calibration) == pytest.approx(CLAIMS**2, abs=0.05)


def test_claims_at_temperature_1_are_corrected_for_the_arg_max_of_paths():
    rng, calibration = np.random.default_rng(0), Calibration.none(1)

    def path():
        claims = rng.uniform(0.1, 0.95, 4).cumprod()
        return claims, claims**0.35

    zeros, greedy = np.zeros(4, np.int64), np.zeros(4, np.bool_)
    for _ in range(4000):
        claims, likely = path()
        chances = likely / np.append(1.0, likely[:-1])
        sampled = np.logical_and.accumulate(rng.random(4) < chances)
        calibration = calibration.learnt(zeros, greedy, claims, sampled, zeros)
    claims, likely = np.concatenate([path() for _ in range(2000)], axis=1)
    worth = map_of(calibration, claims=claims)
    for b in np.unique(Calibration.bins(claims)):
        inside = Calibration.bins(claims) == b
        assert worth[inside].mean() == pytest.approx(likely[inside].mean(), abs=0.05)


def test_the_map_never_falls_whatever_is_seen():
    rng = np.random.default_rng(1)
    for _ in range(200):
        calibration = Calibration.none(2)
        for _ in range(rng.integers(1, 8)):
            q = int(rng.integers(1, 100))
            nodes = (
                rng.integers(0, 2, q),
                rng.random(q) < 0.5,
                rng.random(q),
                rng.random(q) < rng.random(),
            )
            calibration = calibration.learnt(*nodes)
        for draft, sampled in itertools.product((0, 1), (False, True)):
            values = map_of(calibration, draft, sampled)
            assert (np.diff(values) >= -1e-12).all()
            assert values[0] >= 0
            assert values[-1] <= 1


def test_of_claims_that_hold_the_other_way_round_all_are_worth_the_same():
    calibration = taught(0.9, 0.2, 4000, drafts=1)
    calibration = taught(0.45, 0.7, 4000, drafts=1, start=calibration)
    low, high = map_of(calibration, claims=np.array([0.45, 0.9]))
    assert low == pytest.approx(high)
    assert low == pytest.approx(0.45, abs=0.03)


def test_what_was_is_forgotten_within_some_ten_thousands_of_nodes_of_the_same_draft():
    before = taught(0.9, 0.9, 40_000)
    claim = np.array([0.9])
    soon, late = (
        map_of(taught(0.9, 0.3, n, start=before), claims=claim).item() for n in (2000, 80_000)
    )
    assert soon > 0.75
    assert late < 0.35
    others = taught(0.9, 0.3, 80_000, draft=1, start=before)
    assert map_of(others, claims=claim) == pytest.approx(map_of(before, claims=claim))


def test_steps_learnt_together_are_as_steps_learnt_one_by_one():
    rng = np.random.default_rng(2)
    steps = [
        (rng.integers(0, 2, 30), rng.random(30) < 0.5, rng.random(30), rng.random(30) < 0.5)
        for _ in range(5)
    ]
    apart = together = Calibration.none(2)
    for step in steps:
        apart = apart.learnt(*step)
    together = together.learnt(*map(np.concatenate, zip(*steps, strict=True)))
    assert map_of(together, 1, True) == pytest.approx(map_of(apart, 1, True), abs=1e-3)


def test_learning_leaves_the_calibration_that_it_starts_from_alone():
    start = taught(0.9, 0.5, 100)
    before = [column.copy() for column in start.counts]
    taught(0.9, 0.0, 100, start=start)
    for was, now in zip(before, start.counts, strict=True):
        assert (was == now).all()


def test_no_nodes_teach_nothing_and_are_worth_nothing():
    none, start = np.zeros(0, np.int64), taught(0.9, 0.5, 100)
    assert start.learnt(none, none > 0, none / 1.0, none > 0) is start
    assert len(start.probability(none, none > 0, none / 1.0)) == 0


def test_bins_hold_their_lower_edges():
    assert len(EDGES) + 1 == BINS
    nodes = np.zeros(len(EDGES), np.int64)
    after = Calibration.none(1).learnt(nodes, nodes > 0, EDGES, nodes > 0)
    assert after.counts.nodes[0, 0, :, 0].sum(0).tolist() == [0.0] + [1.0] * (BINS - 1)


# -- over a restart


def planner(drafts=("small", "large")):
    return AdaptivePlanner(drafts, LatencyModel.unit(len(drafts)))


def saved(calibration):
    p = planner()
    state = p.start()
    state.acceptance.now = 0.0  # a step was seen
    return json.loads(json.dumps(p.save(replace(state, calibration=calibration), 0.0)))


def test_what_confidences_are_worth_outlasts_a_restart():
    known = taught(0.9, 0.4, 1000, draft=1, sampled=True)
    back = planner().load(saved(known), 5.0, 3600.0).calibration
    for draft, sampled in itertools.product((0, 1), (False, True)):
        assert (map_of(back, draft, sampled) == map_of(known, draft, sampled)).all()


def test_what_a_draft_s_confidence_is_worth_goes_with_its_name():
    known = taught(0.9, 0.4, 1000, draft=1)
    names = ("large", "new")
    back = planner(names).load(saved(known), 0.0, 0.0).calibration
    assert map_of(back, 0) == pytest.approx(map_of(known, 1))
    assert map_of(back, 1) == pytest.approx(CLAIMS)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nodes", lambda a: -a),
        ("nodes", lambda a: a[:, :1]),
        ("nodes", lambda a: np.full(a.shape, "many")),
        ("claimed", lambda a: 1.2 * a),
        ("claimed", lambda a: 0.5 * a),
        ("claimed", lambda a: a * np.nan),
        ("matched", lambda a: 3 * a),
    ],
)
def test_counts_that_cannot_be_are_refused_by_their_name(name, change):
    data = saved(taught(0.9, 0.5, 1000))
    entry = data["tenants"][0]["drafts"]["small"]
    entry[name] = change(np.array(entry[name])).tolist()
    with pytest.raises(LearnedError, match=f"tenants.0.drafts.small.{name}"):
        planner().load(data, 0.0, 0.0)


@pytest.mark.parametrize("name", ["nodes", "claimed", "matched"])
def test_counts_that_are_missing_are_named(name):
    data = saved(taught(0.9, 0.5, 100))
    del data["tenants"][0]["drafts"]["small"][name]
    with pytest.raises(LearnedError, match=f"tenants.0.drafts.small.{name} is missing"):
        planner().load(data, 0.0, 0.0)
