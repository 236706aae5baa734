import numpy as np
import pytest

from policy.trees import TreeCosts, best_trees, tree_tokens

HAZARD = np.array([[0.6, 0.4, 0.3]] * 4)  # a draft that is right six times in ten, its next guesses less often


def roofline(rows, most):
    """Seconds of a step of ``rows`` with 0..most proposed tokens: level up to 24 tokens, then in proportion; a forward is a tenth."""
    tokens = rows + np.arange(most + 1)
    return TreeCosts(np.maximum(1.0, tokens / 24), np.full(4, 0.1))


def under_own_price(rows):
    """The trees of a batch under the goodput that they reach themselves (Dinkelbach)."""
    prices, price = roofline(rows, rows * 12), 1.0
    for _ in range(20):
        found = best_trees(np.repeat(HAZARD[None], rows, 0), np.ones(rows), np.full(rows, 4), price, prices)
        price = found.value / found.step_s
    return found


def test_as_load_rises_trees_shrink_to_chains_and_then_to_no_speculation():
    widest = [int(under_own_price(rows).widths.max()) for rows in (1, 2, 4, 8, 12, 16, 24, 32)]
    assert widest == sorted(widest, reverse=True)
    assert widest[0] == 3
    assert 1 in widest
    assert widest[-1] == 0


def test_widths_of_one_are_a_chain():
    assert tree_tokens(HAZARD, np.array([1, 1, 1, 0])) == pytest.approx(1 + 0.6 + 0.36 + 0.216)


def test_a_batch_without_rows_and_a_draft_without_positions_plan_nothing():
    assert best_trees(np.zeros((0, 4, 2)), np.zeros(0), np.zeros(0, np.int64), 1.0, roofline(1, 4)).widths.shape == (0, 4)
    assert best_trees(np.zeros((2, 0, 0)), np.ones(2), np.zeros(2, np.int64), 1.0, roofline(2, 4)).widths.shape == (2, 0)


def test_a_total_without_room_in_kv_is_never_planned():
    prices = TreeCosts(np.array([1.0, 1.0, 1.0, np.inf, np.inf]), np.zeros(4))
    for price in (0.0, 0.1):
        assert best_trees(HAZARD[None], np.ones(1), np.array([4]), price, prices).widths.sum() == 2
