"""Evidence of drafts that show none of their own: how long they have been right."""

import numpy as np
import pytest

from backend.request import SamplingParams
from backend.sequence import Proposal, Sequence
from backend.speculation.step_log import StepLog
from backend.speculation.streaks import Streaks
from policy.evidence import EVIDENCE_BINS
from policy.streaks import bin_of_streak, bins_of_streaks, streak_after

CHAIN = Proposal.chain("head", [1, 2, 3])


def sequence(number=1):
    return Sequence(number, [0], 1, SamplingParams())


def note(streaks, proposal, emitted, verified=3, request=1):
    log = StepLog(("head", "suffix", "small"))
    log.record(request, proposal, verified, emitted, drawn=False)
    streaks.note(log.rows[-1])


def shown(streaks, *sequences, ceiling=(8, 8, 8)):
    sequences = sequences or (sequence(),)
    evidence = np.zeros((len(sequences), 3), np.int64)
    streaks.show(sequences, np.tile(ceiling, (len(sequences), 1)), evidence)
    return evidence.tolist()


def test_a_streak_grows_while_whole_proposals_are_right_and_is_what_was_accepted_after_that():
    streaks = Streaks([0, 2])
    expected = [([1, 2, 3, 9], 4), ([1, 2, 3, 8], 8), ([1, 2, 9], 2), ([1, 2, 3, 9], 6), ([9], 0)]
    for emitted, streak in expected:
        note(streaks, CHAIN, emitted)
        assert shown(streaks) == [[bin_of_streak(streak), 0, 0]]


def test_a_proposal_that_was_cut_is_right_as_far_as_it_is_known():
    streaks = Streaks([0, 2])
    note(streaks, CHAIN, [1, 2], verified=1)  # the target's own token is the draft's next
    assert shown(streaks) == [[bin_of_streak(2), 0, 0]]
    note(streaks, CHAIN, [9], verified=0)
    assert shown(streaks) == [[bin_of_streak(0), 0, 0]]


@pytest.mark.parametrize("proposal", [None, Proposal.chain("suffix", [1])])
def test_only_the_draft_of_the_last_step_has_a_streak(proposal):
    streaks = Streaks([0, 2])
    note(streaks, CHAIN, [1, 2, 3, 4])
    note(streaks, Proposal.chain("small", [1]), [1, 2])
    assert shown(streaks) == [[0, 0, bin_of_streak(2)]]
    note(streaks, proposal, [1, 2])
    assert shown(streaks) == [[0, 0, 0]]


def test_requests_have_streaks_of_their_own_until_they_are_forgotten():
    streaks = Streaks([0, 2])
    note(streaks, CHAIN, [1, 2, 3, 4], request=1)
    note(streaks, CHAIN, [9], request=2)
    long, none = bin_of_streak(4), bin_of_streak(0)
    three = [sequence(number) for number in (2, 3, 1)]
    assert shown(streaks, *three) == [[none, 0, 0], [0, 0, 0], [long, 0, 0]]
    assert shown(streaks, sequence(1), ceiling=(0, 8, 8)) == [[0, 0, 0]]
    streaks.forget([1])
    assert shown(streaks, *three)[2] == [0, 0, 0]


def test_a_streak_of_nothing_is_not_no_evidence():
    bins = [bin_of_streak(streak) for streak in range(60)]
    assert bins == sorted(bins)
    assert (bins[0], bins[1]) == (1, 2)
    assert bins[-1] < EVIDENCE_BINS
    assert bins_of_streaks(np.arange(-1, 60)).tolist() == [0, *bins]
    assert streak_after(7, accepted=2, scored=2, emitted=2) == 9  # the end of a text
