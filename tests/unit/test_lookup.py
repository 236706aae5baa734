import random

import pytest

from backend.engines.lookup import LookupEngine
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams


def engine(**options):
    return LookupEngine("lookup", **{"max_draft_tokens": 8, **options})


def sequence(tokens, sequence_id=1):
    return Sequence(sequence_id, list(tokens), len(tokens), SamplingParams())


def propose(lookup, seq, run):
    lookup.submit([Turn(seq, len(seq.tokens), run=run, keep_probs=True)])
    (completion,) = lookup.poll(0.0)
    assert (completion.sequence_id, completion.probs, completion.error) == (seq.id, None, None)
    return completion.tokens


def reference(tokens, run, min_ngram, max_ngram):
    """The definition, by brute force: longest suffix first, most recent occurrence first, read on into the proposal itself."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for i in range(run):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


def test_the_continuation_of_the_longest_match_is_proposed():
    seq = sequence([1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2, 3])
    assert propose(engine(), seq, 3) == [4, 9, 2]  # (1, 2, 3) beats the later (2, 3)


def test_of_equal_matches_the_most_recent_wins():
    assert propose(engine(), sequence([1, 2, 5, 1, 2, 6, 1, 2]), 2) == [6, 1]


def test_a_match_that_reaches_the_end_reads_on_into_the_proposal():
    assert propose(engine(), sequence([5, 1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]


def test_without_a_match_nothing_is_available_or_proposed():
    lookup, seq = engine(), sequence([1, 2, 3, 4])
    assert lookup.available(seq, 4) == 0
    assert propose(lookup, seq, 4) == []


def test_shorter_matches_than_min_ngram_do_not_count():
    seq = sequence([1, 2, 3, 1])
    assert propose(engine(min_ngram=2), seq, 2) == []
    assert propose(engine(min_ngram=1), seq, 2) == [2, 3]


def test_available_is_the_length_that_a_turn_returns():
    lookup, seq = engine(max_draft_tokens=3), sequence([1, 2, 3, 4, 1, 2])
    assert [lookup.available(seq, length) for length in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert [len(propose(lookup, seq, length)) for length in (0, 2, 3, 9)] == [0, 2, 3, 3]


@pytest.mark.parametrize("ngrams", [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_a_growing_text_gets_what_the_definition_says(ngrams):
    rng = random.Random(7)
    lookup, seq = engine(min_ngram=ngrams[0], max_ngram=ngrams[1]), sequence([])
    found = 0
    while len(seq.tokens) < 300:
        seq.tokens += rng.choices(range(6), k=rng.choice([0, 1, 1, 2, 5]))
        expected = reference(seq.tokens, 4, *ngrams)
        assert lookup.available(seq, 4) == len(expected)
        assert propose(lookup, seq, 4) == expected
        found += bool(expected)
    assert found > 20


def test_sequences_do_not_see_each_other_and_cancel_forgets():
    lookup, first, second = engine(), sequence([1, 2, 3, 1, 2]), sequence([1, 2], sequence_id=2)
    assert lookup.available(second, 4) == 0
    lookup.submit([Turn(first, 5, run=2), Turn(second, 2, run=2)])
    lookup.cancel([1])
    assert [completion.sequence_id for completion in lookup.poll(0.0)] == [2]
    assert lookup.available(sequence([7, 8]), 4) == 0  # id 1 again: another text


def test_a_prefill_turn_proposes_nothing_and_nothing_is_ever_unseen():
    lookup, seq = engine(), sequence([1, 2, 1, 2])
    assert lookup.unseen(seq) == 0
    assert propose(lookup, seq, 0) == []


def test_verification_is_refused_turn_by_turn():
    lookup, seq = engine(), sequence([1, 2, 1, 2])
    lookup.submit([Turn(seq, 4, run=1, proposal=Proposal("other", [3]))])
    (completion,) = lookup.poll(0.0)
    assert "cannot verify" in completion.error
    assert completion.tokens == []


def test_lookup_is_free_and_keeps_no_kv():
    assert (engine().limits.free, engine().limits.kv_blocks) == (True, 0)


def test_a_range_of_ngrams_that_is_empty_is_refused():
    with pytest.raises(ValueError, match="min_ngram must be from 1 to max_ngram 2, got 3"):
        engine(min_ngram=3, max_ngram=2)
