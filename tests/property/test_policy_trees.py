"""Trees and merged chains against enumeration: of outcomes for what they emit, of shapes for what is best."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.goodput import StepProblem
from policy.merging import merge, merged_tokens
from policy.optimiser import best_choice
from policy.trees import TreeCosts, best_trees, rank_chances, tree_tokens


def ordered_hazards(rng, *shape):
    """Rank hazards that never rise with the rank, as those of draws from one law."""
    return -np.sort(-rng.uniform(0, 0.9, shape), axis=-1)


def costs(rng, nodes, depths):
    steps = rng.exponential(0.3, nodes) * (rng.random(nodes) < 0.5)
    return TreeCosts(1 + np.concatenate([[0], np.cumsum(steps)]), rng.uniform(0, 0.4, depths), float(rng.choice([0.0, 0.2])))


def emitted_by_hand(hazard, widths):
    """Walk the tree: at each depth one rank after another is tested; the first rank goes on, another ends it, none ends it before."""
    total, here = 1.0, 1.0
    for depth, width in enumerate(widths):
        untested = here
        for rank in range(width):
            accepted = untested * hazard[depth, rank]
            total += accepted
            untested -= accepted
            if rank == 0:
                on = accepted
        here = on if width else 0.0
    return total


def seconds(widths, price):
    nodes, depth = int(widths.sum()), int((widths > 0).sum(1).max())
    return price.verify_s[nodes] + price.depth_s[:depth].sum() + price.speculation_s * (nodes > 0)


def all_trees(depths, ranks, ceiling, room):
    for widths in itertools.product(range(ranks + 1), repeat=depths):
        depth = depths - widths.count(0)
        if all(widths[:depth]) and depth <= ceiling and sum(widths) <= room:
            yield widths


def brute_force(hazard, weight, ceiling, room, price, prices):
    rows, depths, ranks = hazard.shape
    best = -np.inf
    for widths in itertools.product(*(all_trees(depths, ranks, ceiling[i], room[i]) for i in range(rows))):
        if sum(map(sum, widths)) < len(prices.verify_s):
            value = sum(weight[i] * emitted_by_hand(hazard[i], widths[i]) for i in range(rows))
            best = max(best, value - price * seconds(np.array(widths), prices))
    return best


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3))
def test_a_tree_emits_what_walking_it_gives(seed, depths, ranks):
    hazard = np.random.default_rng(seed).uniform(0, 1, (depths, ranks))
    for widths in all_trees(depths, ranks, depths, depths * ranks):
        assert tree_tokens(hazard, np.array(widths)) == pytest.approx(emitted_by_hand(hazard, widths))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.floats(0.05, 3.0))
def test_the_widths_are_the_best_there_are(seed, rows, depths, ranks, price):
    rng = np.random.default_rng(seed)
    hazard, weight = ordered_hazards(rng, rows, depths, ranks), rng.choice([1.0, 0.5, 2.0], rows)
    prices = costs(rng, int(rng.integers(0, rows * depths * ranks + 3)), depths)
    ceiling, room = rng.integers(0, depths + 1, rows), rng.integers(0, depths * ranks + 1, rows)
    found = best_trees(hazard, weight, ceiling, price, prices, room)
    assert [tuple(row) in all_trees(depths, ranks, ceiling[i], room[i]) for i, row in enumerate(found.widths.tolist())] == [True] * rows
    assert found.step_s == pytest.approx(seconds(found.widths, prices))
    assert found.value == pytest.approx(sum(weight[i] * emitted_by_hand(hazard[i], found.widths[i]) for i in range(rows)))
    assert found.value - price * found.step_s == pytest.approx(brute_force(hazard, weight, ceiling, room, price, prices))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 2), st.floats(0.05, 3.0))
def test_where_ranks_are_estimated_out_of_order_trees_are_legal_and_never_worse_than_chains(seed, rows, price):
    rng = np.random.default_rng(seed)
    hazard, ceiling, room = rng.uniform(0, 1, (rows, 3, 3)), np.full(rows, 3), np.full(rows, 9)
    prices = costs(rng, rows * 9, 3)
    found = best_trees(hazard, np.ones(rows), ceiling, price, prices)
    assert all(tuple(row) in all_trees(3, 3, 3, 9) for row in found.widths.tolist())
    chains = brute_force(hazard[:, :, :1], np.ones(rows), ceiling, room, price, prices)
    assert found.value - price * found.step_s >= chains - 1e-9


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 5), st.floats(0.05, 3.0))
def test_trees_of_one_rank_for_one_row_are_the_chains_that_the_optimiser_finds(seed, depths, price):
    rng = np.random.default_rng(seed)
    hazard, steps = rng.uniform(0, 1, (1, depths, 1)), rng.exponential(0.2, depths) * (rng.random(depths) < 0.5)
    problem = StepProblem(
        gain=np.cumprod(hazard, axis=1).transpose(1, 2, 0),
        ceiling=np.array([[depths]]),
        base_value=1.0,
        verify_s=1 + np.concatenate([[0], np.cumsum(steps)]),
        speculation_s=float(rng.choice([0.0, 0.1])),
        forward_s=np.concatenate([[0], np.cumsum(rng.uniform(0, 0.2, 2))])[None],
        first_tokens=rng.integers(1, 3, (1, 1)),
        row_s=rng.uniform(0, 0.05, (1, 1)),
        switch_s=rng.uniform(0, 0.5, (1, 1)),
        horizon=rng.uniform(1, 16, 1),
    )
    choice, result, _ = best_choice(problem, price)
    found = best_trees(hazard, np.ones(1), problem.ceiling[0], price, TreeCosts.of(problem, 0))
    assert found.widths.sum() == choice.length.sum()
    assert (found.value, found.step_s) == pytest.approx((result.value, result.charged_s))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_dearer_second_never_buys_more_time(seed, rows):
    rng = np.random.default_rng(seed)
    hazard, prices = ordered_hazards(rng, rows, 4, 3), costs(rng, rows * 12, 4)
    taken = [best_trees(hazard, np.ones(rows), np.full(rows, 4), price, prices).step_s for price in (0.1, 0.3, 1.0, 3.0, 10.0)]
    assert taken == sorted(taken, reverse=True)


def law_after_two_draws(p, q, dedupe):
    """The law of the token that two children drawn from q lead to, by enumeration of the draws; and the chance of each to be accepted."""
    law, accepted = np.zeros(len(p)), np.zeros(2)
    for draws in itertools.product(range(len(p)), repeat=2):
        alive, left = float(np.prod(q[list(draws)])), p
        for rank, x in enumerate(draws):
            if rank and dedupe and x == draws[0]:
                continue
            chance = min(1.0, left[x] / q[x])
            law[x] += alive * chance
            accepted[rank] += alive * chance
            alive *= 1 - chance
            if alive <= 0:
                break
            left = np.maximum(left - q, 0) / np.maximum(left - q, 0).sum()
        law += alive * left
    return law, accepted


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_drawn_siblings_are_exact_with_nodes_of_their_own_and_no_rank_is_accepted_more_often_than_the_one_before(seed):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(4), 2)
    law, accepted = law_after_two_draws(p, q, dedupe=False)
    assert law == pytest.approx(p)
    assert accepted[0] >= accepted[1] - 1e-12
    hazard = np.array([accepted[0], accepted[1] / (1 - accepted[0])])
    assert rank_chances(hazard) == pytest.approx(accepted)


def test_dropping_a_second_draw_that_equals_the_first_changes_the_law():
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    assert np.abs(law_after_two_draws(p, q, dedupe=True)[0] - p).max() > 0.01


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=3), st.data())
def test_a_merged_tree_holds_every_chain_once_and_shares_nothing_drawn(proposals, data):
    drawn = data.draw(st.lists(st.booleans(), min_size=len(proposals), max_size=len(proposals)))
    tree = merge(proposals, drawn)
    assert (tree.parent < np.arange(len(tree.token))).all()
    point_mass = {tuple(p[: j + 1]) for p, own in zip(proposals, drawn, strict=True) if not own for j in range(len(p))}
    assert len(tree.token) == len(point_mass) + sum(len(p) for p, own in zip(proposals, drawn, strict=True) if own)
    paths = []
    for node in range(len(tree.token)):
        path = [int(tree.token[node])]
        while (node := int(tree.parent[node])) >= 0:
            path.insert(0, int(tree.token[node]))
        paths.append(tuple(path))
    for proposal, own in zip(proposals, drawn, strict=True):
        for j in range(len(proposal)):
            wanted = tuple(proposal[: j + 1])
            copies = sum(tuple(p[: j + 1]) == wanted and len(p) > j for p, o in zip(proposals, drawn, strict=True) if o)
            assert paths.count(wanted) == copies + (wanted in point_mass)
            assert own or wanted in point_mass


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_merged_chains_emit_what_testing_them_in_order_gives(seed):
    """Branching at the root by hand: the first chain whose first token is accepted is followed as far as it goes."""
    rng = np.random.default_rng(seed)
    chains = [rng.uniform(0, 1, rng.integers(1, 4)) for _ in range(3)]
    total, missed = 1.0, 1.0
    for hazard in chains:
        alive = missed
        for chance in hazard:
            alive *= chance
            total += alive
        missed -= missed * hazard[0]
    assert merged_tokens(chains) == pytest.approx(total)
