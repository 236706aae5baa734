import numpy as np
import pytest

from bench.simulator.device_step import DeviceRecord, DeviceRun, Nodes, OracleRun
from bench.simulator.h200 import SCRIPTS, summary
from policy.baselines import FixedLength, NoSpeculation

RECORDED = DeviceRecord.read()


def speed(policy, rows, kind=DeviceRun, requests=24):
    one = kind(RECORDED, policy, rows, SCRIPTS["mixed"].kind_of(rows), 0)
    return one.run(lambda: one.arrived >= rows + requests)


def test_a_fixed_length_is_as_fast_as_on_the_gpu():
    # Tokens a second by device time, from the record: 2.791 tokens of 8 rows in 7.515 ms.
    assert speed(FixedLength("large", 4), 8) == pytest.approx(8 * 2.791 / 7.515e-3, rel=0.03)
    assert speed(NoSpeculation(), 8) == pytest.approx(8 * 0.995 / 5.154e-3, rel=0.02)


def test_an_oracle_is_faster_than_any_length():
    fixed = max(speed(FixedLength("large", k), 8) for k in (3, 4, 5))
    assert speed(NoSpeculation(), 8, OracleRun) > fixed


def test_the_likeliest_nodes_of_the_batch_have_their_parents():
    rng = np.random.default_rng(0)
    nodes = Nodes.of(rng.random((5, 8)), np.array([8, 3, 1, 0, 5]))
    chosen = nodes.likeliest(9)
    assert chosen.sum() == 9
    assert nodes.chance[chosen].min() >= nodes.chance[~chosen].max()
    for row, place in zip(*np.nonzero(chosen), strict=True):
        depth = nodes.depth[row, place]
        spine = (nodes.candidate[row] == 0) & (nodes.depth[row] == depth - 1)
        assert depth == 0 or (spine & chosen[row]).any()


def test_a_text_is_followed_along_the_spine_and_onto_one_leaf():
    rate = np.full((3, 8), 0.5)
    nodes = Nodes.of(rate, np.full(3, 2))
    rank = np.array([[0, 0, 0], [0, 1, 0], [4, 0, 0]])
    rank = np.pad(rank, ((0, 0), (0, 5)), constant_values=4)
    followed, ends = nodes.follow(nodes.chance > 0, rank)
    assert followed.tolist() == [2, 2, 0]
    assert ends.tolist() == [False, True, False]


def test_hours_change_and_a_summary_names_the_best_length():
    kind_of = SCRIPTS["hours"].kind_of(2)
    assert [kind_of(number, None) for number in (1, 8, 9, 16, 17)] == [0, 0, 1, 1, 0]
    rows = [
        {"arm": arm, "speed": speed * factor}
        for arm, speed in (("large 2", 10.0), ("large 3", 12.0), ("exact", 15.0))
        for factor in (1.0, 2.0)
    ]
    found = summary(rows)
    assert found["best_fixed"] == "large 3"
    assert found["exact"][0] == 1.25
