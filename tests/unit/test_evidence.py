"""Bins of what drafts show."""

import numpy as np

from policy.evidence import MATCH_EDGES, PAST_TRAINED, bin_of_match, share_evidence


def test_longer_matches_and_places_that_agree_have_higher_bins():
    bins = [bin_of_match(tokens, agree) for tokens in MATCH_EDGES for agree in (False, True)]
    assert bins == list(range(1, PAST_TRAINED))
    assert bin_of_match(0) == bin_of_match(0, agree=True) == 0
    assert bin_of_match(1000, agree=True) == bins[-1]


def test_a_draft_that_shows_nothing_has_the_highest_bin_of_the_row_s_others():
    shown = np.array([[0, 3, 5], [0, 0, 0], [2, 0, 0]])
    assert share_evidence(shown).tolist() == [[5, 3, 5], [0, 0, 0], [2, 2, 2]]
    own = np.array([[0, PAST_TRAINED, 5], [0, PAST_TRAINED, 0]])
    assert share_evidence(own).tolist() == [[5, PAST_TRAINED, 5], [0, PAST_TRAINED, 0]]
    assert share_evidence(np.zeros((0, 2), np.int64)).shape == (0, 2)
