import random

import pytest

from backend.engines.lookup import DOUBT, LONGEST_MATCH, MATCHES, LookupEngine
from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import ROOT, Proposal, Sequence
from policy.evidence import EVIDENCE_BINS, bin_of_match


def engine(**options):
    return LookupEngine("lookup", **{"max_draft_tokens": 8, **options})


def sequence(tokens, sequence_id=1, **options):
    return Sequence(sequence_id, list(tokens), len(tokens), SamplingParams(**options))


def propose(lookup, seq, run, nodes=99):
    lookup.submit([Turn(seq, len(seq.tokens), run=run, nodes=nodes)])
    (completion,) = lookup.poll(0.0)
    assert (completion.sequence_id, completion.tokens, completion.error) == (seq.id, [], None)
    tree = completion.proposal
    assert (tree.draft, tree.depth <= run, len(tree) <= nodes) == ("lookup", True, True)
    assert sorted(tree.confidence, reverse=True) == tree.confidence
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree)
    return tree


def paths(tree):
    """The confidence of every path."""
    found = {ROOT: ()}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        found[node] = (*found[parent], token)
    return {found[node]: confidence for node, confidence in enumerate(tree.confidence)}


def reference(tokens, run, min_ngram, max_ngram):
    """The definition, by brute force: the confidence of every path."""
    ends = {}
    for size in range(max_ngram, min_ngram - 1, -1):
        every = range(len(tokens) - 1, size - 1, -1)
        places = [end for end in every if tokens[end - size : end] == tokens[-size:]]
        for end in places[:MATCHES] if size < len(tokens) else ():
            ends.setdefault(end, size)
    read, sizes = [], {}
    for end, size in [*ends.items()][:MATCHES]:
        alike = common_end(tokens[:end], tokens)
        sizes[end] = min(alike, LONGEST_MATCH) if size == max_ngram else size
    for end, size in sorted(sizes.items(), key=lambda item: -item[1]):
        text = list(tokens)
        for i in range(run):
            text.append(text[end + i])
        read.append((size, tuple(text[len(tokens) :])))
    found = {(): 1.0}
    for depth in range(run):
        for head in {path[:depth] for _, path in read}:
            votes = {}
            for size, path in read:
                if path[:depth] == head:
                    votes[path[depth]] = votes.get(path[depth], 0) + size + depth
            for token, count in votes.items():
                found[(*head, token)] = found[head] * count / (DOUBT + sum(votes.values()))
    del found[()]
    return found


def test_the_continuation_of_the_longest_match_comes_first():
    tree = propose(engine(), sequence([1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2, 3]), 3)
    assert tree.spine().tokens == [4, 9, 2]  # (1, 2, 3) before the later (2, 3)
    assert paths(tree)[5, 7, 1] < paths(tree)[4, 9, 2]


def test_of_equal_matches_the_most_recent_comes_first():
    tree = propose(engine(), sequence([1, 2, 5, 1, 2, 6, 1, 2]), 2)
    assert tree.spine().tokens == [6, 1]
    assert tree.tokens[:2] == [6, 5]


def test_matches_that_agree_share_a_path_and_count_as_likelier():
    tree = propose(engine(), sequence([1, 2, 5, 8, 1, 2, 6, 8, 1, 2, 5, 9, 1, 2]), 2)
    either = {(5, 9): 4 / 8 * 3 / 8, (5, 8): 4 / 8 * 3 / 8, (6, 8): 2 / 8 * 3 / 5}
    assert paths(tree) == pytest.approx({(5,): 4 / 8, (6,): 2 / 8} | either)
    assert tree.spine().tokens == [5, 9]


def test_a_match_that_reaches_the_end_reads_on_into_the_proposal():
    assert propose(engine(), sequence([5, 1, 2, 1, 2]), 5).tokens == [1, 2, 1, 2, 1]


def test_without_a_match_nothing_is_available_or_proposed():
    lookup, seq = engine(), sequence([1, 2, 3, 4])
    assert lookup.available(seq, 4) == 0
    assert propose(lookup, seq, 4).tokens == []


def test_shorter_matches_than_min_ngram_do_not_count():
    seq = sequence([1, 2, 3, 1])
    assert propose(engine(min_ngram=2), seq, 2).tokens == []
    assert propose(engine(min_ngram=1), seq, 2).tokens == [2, 3]


def test_available_is_the_depth_that_a_turn_returns():
    lookup, seq = engine(max_draft_tokens=3), sequence([1, 2, 3, 4, 1, 2])
    assert [lookup.available(seq, length) for length in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert [propose(lookup, seq, length).depth for length in (2, 3)] == [2, 3]


@pytest.mark.parametrize("ngrams", [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_a_growing_text_gets_what_the_definition_says(ngrams):
    rng = random.Random(7)
    lookup, seq = engine(min_ngram=ngrams[0], max_ngram=ngrams[1]), sequence([])
    trees = 0
    while len(seq.tokens) < 300:
        seq.tokens += rng.choices(range(6), k=rng.choice([0, 1, 1, 2, 5]))
        expected = reference(seq.tokens, 4, *ngrams)
        assert lookup.available(seq, 4) == (4 if expected else 0)
        tree = propose(lookup, seq, 4)
        assert paths(tree) == pytest.approx(expected)
        best = propose(lookup, seq, 4, nodes=5)
        assert best == tree.first(5)
        trees += not tree.is_chain
    assert trees > 20


def test_a_grammar_cuts_branches_and_no_others():
    class Guide:
        def count_allowed(self, output, proposed):
            assert list(output) == []
            return next((i for i, token in enumerate(proposed) if token in (8, 9)), len(proposed))

    tree = propose(engine(), sequence([1, 2, 5, 8, 1, 2, 6, 7, 1, 2, 9, 3, 1, 2], guide=Guide()), 3)
    assert {*paths(tree)} == {(5,), (6,), (6, 7), (6, 7, 1)}


def test_memory_is_bounded_by_the_text():
    lookup, seq = engine(), sequence([1, 1] * 500)
    lookup.available(seq, 4)
    assert [len(after) for after in lookup._indices[1]._after.values()] == [MATCHES] * 3


def test_the_evidence_is_the_length_of_the_best_match():
    piece = [*range(100, 140)]
    for size in (0, 2, 3, 4, 5, 9, 31, 32, 40):
        seq = sequence([1, *piece, 2, 3, *piece[len(piece) - size :]])
        assert engine().evidence(seq) == bin_of_match(size, agree=True)
    assert engine().evidence(sequence([7, 8])) == 0
    assert bin_of_match(32, agree=True) < EVIDENCE_BINS


def test_the_evidence_is_of_the_match_whose_continuation_comes_first():
    long, recent = [1, 2, 3, 4, 5, 6], [9, 4, 5, 6]
    once = engine().evidence(sequence([*long, 7, *recent, 8, *long]))
    assert once == bin_of_match(6, agree=True)
    tokens = [*long, 7, 9, 3, 4, 5, 6, 8, *long]
    lookup, seq = engine(), sequence(tokens)
    assert propose(lookup, seq, 1).spine().tokens == [7]  # six tokens are alike before it
    assert lookup.evidence(seq) == bin_of_match(6)


@pytest.mark.parametrize(("then", "agree"), [([7, 7], True), ([7, 8], False)])
def test_the_evidence_is_whether_places_of_the_longest_ngram_go_on_alike(then, agree):
    shorter = [4, 5, 9]
    one, other = then
    tokens = [1, 2, 3, 4, 5, one, *shorter, 2, 2, 3, 4, 5, other, *shorter, 3, 2, 3, 4, 5]
    assert engine().evidence(sequence(tokens)) == bin_of_match(4, agree)


def test_evidence_follows_a_growing_text():
    rng, lookup, seq, longest = random.Random(5), engine(), sequence([]), 0
    while len(seq.tokens) < 300:
        seq.tokens += rng.choices(range(4), k=rng.choice([0, 1, 2, 5]))
        places = range(len(seq.tokens) - 1, 1, -1)
        ends = [(common_end(seq.tokens[:place], seq.tokens), place) for place in places]
        most = next((n for n in (4, 3, 2) if any(size >= n for size, _ in ends)), 99)
        best = [(size, seq.tokens[place]) for size, place in ends if size >= most][:MATCHES]
        lookup.available(seq, 4)
        first = max((size for size, _ in best), default=0)
        assert lookup.evidence(seq) == bin_of_match(first, len({t for _, t in best}) == 1)
        longest = max(longest, first)
    assert longest > 4


def common_end(one, other):
    size = 0
    while size < min(len(one), len(other)) and one[-1 - size] == other[-1 - size]:
        size += 1
    return size


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
    lookup.submit([Turn(seq, 4, run=0)])
    (completion,) = lookup.poll(0.0)
    assert (completion.tokens, completion.proposal) == ([], None)


def test_verification_is_refused_turn_by_turn():
    lookup, seq = engine(), sequence([1, 2, 1, 2])
    lookup.submit([Turn(seq, 4, run=1, proposal=Proposal.chain("other", [3]))])
    (completion,) = lookup.poll(0.0)
    assert "cannot verify" in completion.error
    assert completion.tokens == []


def test_lookup_is_free_and_keeps_no_kv():
    assert (engine().limits.free, engine().limits.kv_blocks) == (True, 0)


def test_a_range_of_ngrams_that_is_empty_is_refused():
    with pytest.raises(ValueError, match="min_ngram must be from 1 to max_ngram 2, got 3"):
        engine(min_ngram=3, max_ngram=2)
