from itertools import product

import numpy as np
import pytest

from policy.confidence import BINS, Calibration, bins, lengths

WORDS, PLACES = 3, 3
HAZARD = np.linspace(0.1, 0.9, BINS)


def conditionals(seed):
    """A random law of the next word by what is there already."""
    rng, prefixes = np.random.default_rng(seed), [x for n in range(PLACES + 1) for x in product(range(WORDS), repeat=n)]
    return {prefix: rng.dirichlet(np.full(WORDS, 0.7)) for prefix in prefixes}


def chance(law, words, start=0):
    """The chance of words from place ``start`` on, given those before."""
    return float(np.prod([law[words[:i]][words[i]] for i in range(start, len(words))]))


def kept_lengths(q, words):
    """How many of a chain's tokens are drafted by the rule: each that is drafted is kept."""
    sure = np.array([[q[words[:i]][words[i]] for i in range(PLACES)]])
    return int(lengths(sure, np.array([0.8]), HAZARD, 1.0, 0.3)[0])


def discarding(q, words):
    """How many are left if the first token in which the draft is not sure is thrown away, with all behind it."""
    return next((i for i in range(PLACES) if q[words[:i]][words[i]] < 0.4), PLACES)


def emitted(p, q, rule):
    """The law of the first places emitted by one step of speculation, which the target's own words complete, by enumeration."""
    law = dict.fromkeys(product(range(WORDS), repeat=PLACES), 0.0)
    for chain in product(range(WORDS), repeat=PLACES):
        mass, drafted = chance(q, chain), rule(q, chain)
        for i in range(drafted):
            here = chain[:i]
            accept = min(1.0, p[here][chain[i]] / q[here][chain[i]])
            rest = np.maximum(p[here] - q[here], 0.0)
            for words in law:
                if words[:i] == here and accept < 1:
                    law[words] += mass * (1 - accept) * rest[words[i]] / rest.sum() * chance(p, words, i + 1)
            mass *= accept
        for words in law:
            if words[:drafted] == chain[:drafted]:
                law[words] += mass * chance(p, words, drafted)
    return law


def error(p, q, rule):
    return max(abs(mass - chance(p, words)) for words, mass in emitted(p, q, rule).items())


@pytest.mark.parametrize("seed", range(8))
def test_to_keep_a_token_and_decide_of_the_next_by_how_sure_it_was_changes_no_law(seed):
    p, q = conditionals(seed), conditionals(100 + seed)
    assert len({kept_lengths(q, words) for words in product(range(WORDS), repeat=PLACES)}) > 1
    assert error(p, q, kept_lengths) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_to_discard_a_token_for_its_own_probability_does(seed):
    assert error(conditionals(seed), conditionals(100 + seed), discarding) > 1e-3


def test_discarding_is_as_wrong_as_was_worked_out_by_hand():
    """One place of four words; tokens with a probability below 0.25 are thrown away and the place is sampled from the target."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    kept = q >= 0.25
    taken = np.where(kept, q * np.minimum(1, p / q), 0.0)
    rest = np.maximum(p - q, 0)
    law = taken + q[~kept].sum() * p + (q[kept].sum() - taken.sum()) * rest / rest.sum()
    assert law == pytest.approx([0.55, 0.19, 0.195, 0.065])


def test_a_token_is_drafted_or_not_whatever_its_own_confidence_is():
    rng = np.random.default_rng(0)
    sure, first = rng.random((200, 6)), rng.uniform(0.3, 1.0, 200)
    found = lengths(sure, first, HAZARD, 2.0, 0.1)
    assert set(found.tolist()) >= {1, 2, 3}
    for i in range(6):
        other = sure.copy()
        other[:, i:] = rng.random((200, 6 - i))
        again = lengths(other, first, HAZARD, 2.0, 0.1)
        assert (np.minimum(found, i + 1) == np.minimum(again, i + 1)).all()


def test_drafting_goes_on_while_the_next_token_is_worth_its_time():
    sure, hazard = np.array([[0.99, 0.99, 0.05, 0.99]]), HAZARD
    survival = np.cumprod([0.8, 0.9, 0.9, 0.1])
    for cost_s, expected in ((0.0, 4), (0.06, 4), (0.07, 3), (0.7, 2), (0.75, 1), (0.9, 0)):
        assert expected == (survival > cost_s).sum()
        assert lengths(sure, np.array([0.8]), hazard, 1.0, cost_s).tolist() == [expected]
        assert lengths(sure, np.array([0.8]), hazard, 2.0, cost_s / 2).tolist() == [expected]


def test_only_positions_that_were_reached_count_each_by_the_confidence_before_it():
    sure = np.array([[0.99, 0.05, 0.5], [0.99, 0.99, 0.99], [0.05, 0.99, 0.99]])
    told = Calibration().learnt(sure, np.array([2, 0, 3]), np.array([3, 3, 2]))
    low, middle, high = bins(np.array([0.05, 0.5, 0.99]))
    assert (told.reached[high], told.accepted[high]) == (1, 1)  # the second position of the first chain
    assert (told.reached[low], told.accepted[low]) == (
        2,
        1,
    )  # its third one failed; the third chain's second held, its third was not scored
    assert told.reached.sum() == 3
    assert told.reached[middle] == 0
    again = told.learnt(sure[:1], np.array([2]), np.array([3]), keep=0.5)
    assert (again.reached[low], again.accepted[low]) == (2.0, 0.5)


def test_the_hazard_by_confidence_is_found_and_is_the_level_where_nothing_is_known():
    rng = np.random.default_rng(3)
    sure = rng.uniform(0.5, 1.0, (4000, 5))
    true = np.concatenate([np.full((4000, 1), 0.9), sure[:, :-1]], axis=1)  # as likely as the draft was sure of the token before
    accepted = np.cumprod(rng.random((4000, 5)) < true, axis=1).sum(1)
    hazard = Calibration().learnt(sure, accepted, np.full(4000, 5)).hazard(0.6)
    assert hazard[bins(np.array([0.1, 0.3]))] == pytest.approx(0.6)
    assert hazard[bins(np.array([0.55, 0.7, 0.85, 0.95, 0.99]))] == pytest.approx([0.575, 0.725, 0.85, 0.935, 0.985], abs=0.03)
