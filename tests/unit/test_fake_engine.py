import math
import random
from dataclasses import replace

import numpy as np
import pytest

from backend.engines.port import AFTER, DeviceProposal, Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.markov import MarkovChain, _log_softmax, _processed
from tests.options import processed

PROMPT = list(b"once upon a time")
NOTHING = Proposal.chain("d", [])


def sequence(temperature=0.0, seed=1, **options):
    return Sequence(1, list(PROMPT), len(PROMPT), SamplingParams(temperature, seed=seed, **options))


def step(engine, seq, k=0, nodes=0, **turn):
    asked = {"run": k, "nodes": nodes or k} if k else {}
    engine.submit([Turn(seq, len(seq.tokens), **asked, **turn)])
    (completion,) = engine.poll(0.0)
    return completion


def decode(seq, tokens, draft=None, rng=None):
    """Return the log-probabilities of plain decoding, or of speculation with random trees."""
    target, log_probs = FakeEngine("t"), []
    while len(seq.tokens) < len(PROMPT) + tokens:
        k = rng.randint(0, 4) if draft else 0
        proposal = step(draft, seq, k=k, nodes=rng.randint(k, 9)).proposal if k else None
        verified = step(target, seq, proposal=proposal)
        assert len(verified.tokens) == verified.accepted + 1
        seq.tokens += verified.tokens
        log_probs += verified.log_probs or []
    return log_probs


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8}])
@pytest.mark.parametrize("nodes", [4, 9])
def test_speculation_emits_what_plain_decoding_emits(sampling, nodes):
    target, draft = FakeEngine("t"), FakeEngine("d", agreement=0.5, seed=3)
    plain, fast = sequence(**sampling), sequence(**sampling)
    while len(plain.tokens) < 200:
        plain.tokens += step(target, plain).tokens
    target.cancel([1])
    accepted = 0
    while len(fast.tokens) < 200:
        proposal = step(draft, fast, k=4, nodes=nodes).proposal
        verified = step(target, fast, proposal=proposal)
        assert verified.accepted == len(proposal.follow(verified.tokens))
        assert len(verified.tokens) == verified.accepted + 1
        accepted += verified.accepted
        fast.tokens += verified.tokens
    assert fast.tokens[:200] == plain.tokens[:200]
    assert 20 < accepted < 150


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.7}])
def test_tokens_follow_the_distribution(options):
    counts, shares = np.zeros(257), np.array([0.6, 0.25, 0.1, 0.05])
    for seed in range(3000):
        counts[step(FakeEngine("t"), sequence(1.0, seed, **options)).tokens[0]] += 1
    shares = shares[: len(np.flatnonzero(counts))]  # the likeliest tokens are kept
    assert len(shares) == (2 if options else 4)
    found, expected = np.sort(counts)[::-1][: len(shares)], 3000 * shares / shares.sum()
    assert ((found - expected) ** 2 / expected).sum() < 21.1  # 3 degrees of freedom: once in 1e4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_proposes_a_tree_that_is_best_first_along_its_own_tokens(temperature):
    draft, seq = FakeEngine("d"), sequence(temperature)
    own = step(draft, replace(seq, id=2), run=3).tokens
    found = step(draft, seq, k=3, nodes=6)
    tree = found.proposal
    assert (found.tokens, tree.draft, len(tree), tree.depth <= 3) == ([], "d", 6, True)
    assert sorted(tree.confidence, reverse=True) == tree.confidence
    assert tree.confidence[-1] > 0.0
    assert tree.confidence[0] < 1.0
    assert tree.spine().tokens == own[: len(tree.spine())]
    at_root = [c for c, parent in zip(tree.confidence, tree.parents, strict=True) if parent == ROOT]
    assert len(at_root) > 1
    assert sum(at_root) < 1.0 + 1e-9
    chain = step(draft, replace(seq, id=3), k=3, nodes=1).proposal
    assert chain.tokens == own[:1]


def test_a_tree_is_followed_to_a_leaf_and_the_kv_of_its_path_is_kept():
    """Nodes off the path leave KV where text comes later; it is not believed to be the text's."""
    prompt = PROMPT * (BLOCK_TOKENS // len(PROMPT))  # the block is full
    target, seq = FakeEngine("t", kv_blocks=4), replace(sequence(), tokens=prompt)
    seq.blocks["t"] = [2, 0, 1]
    right = step(FakeEngine("x"), replace(seq, blocks={}), run=3).tokens
    tree = Proposal("d", [1, right[0], 2, right[1], 3], [ROOT, ROOT, 1, 1, 3], [1.0] * 5)
    verified = step(target, seq, proposal=tree)
    assert (verified.error, verified.tokens, verified.accepted) == (None, right, 2)
    seq.tokens += verified.tokens
    assert target.unseen(seq) == 1
    wrong = step(target, seq, proposal=Proposal.chain("d", [1, 1, 1]))
    assert (wrong.error, wrong.accepted, len(wrong.tokens)) == (None, 0, 1)
    seq.tokens += wrong.tokens
    assert target.unseen(seq) == 1
    assert step(target, seq).error is None
    target.pool[0, 3] += 1
    assert "was overwritten" in step(target, seq).error


OPTIONS = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "prompt_ignore_length": 3,
    "min_tokens": 9,
    "end_ids": (*b"aeiou", 256),
    "bad_words": (tuple(b"e"), tuple(b"ea"), tuple(b"me "), (*PROMPT[-2:], ord("r"))),
    "bias": ((ord("!"), 27.5), (ord("q"), -1.0)),
}


def crossed():
    """Sets of options: each alone, then random mixes of them."""
    rng = random.Random(3)
    mixes = [dict(rng.sample(sorted(OPTIONS.items()), rng.randint(2, 8))) for _ in range(20)]
    return [{name: value} for name, value in OPTIONS.items()] + mixes


@pytest.mark.parametrize(
    "mode", [(0.0, {}), (0.7, {"top_k": 1}), (0.7, {}), (1.5, {"top_p": 0.8, "top_k": 3})]
)
def test_no_option_depends_on_how_the_text_was_cut_into_runs(mode):
    temperature, fixed = mode
    for index, options in enumerate(crossed()):
        plain = sequence(temperature, seed=index, log_probs=True, **fixed, **options)
        fast = replace(plain, tokens=list(PROMPT))
        expected = decode(plain, 40)
        found = decode(fast, 40, FakeEngine("d", agreement=0.6, seed=9), random.Random(index))
        count = min(len(expected), len(found))
        assert fast.tokens[: len(PROMPT) + count] == plain.tokens[: len(PROMPT) + count], options
        assert found[:count] == expected[:count], options


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_options_change_the_distribution_as_documented(temperature):
    context = PROMPT + list(b"eeab")
    for options in crossed():
        made = sequence(temperature, **options)
        _, scores = MarkovChain().chances(context, len(PROMPT), SamplingParams(1.0, seed=1))
        before = scores + 3.0  # logits of any level
        expected = processed(before, context, len(PROMPT), made.sampling)
        found = _log_softmax(_processed(before.copy(), context, len(PROMPT), made.sampling))
        assert found == pytest.approx(expected - np.log(np.exp(expected).sum()), abs=1e-9), options


def test_log_probabilities_are_of_the_distribution_before_top_k_and_top_p():
    seq = sequence(0.5, top_k=1, top_p=0.1, log_probs=True)
    emitted = step(FakeEngine("t"), seq)
    weights = np.array([0.6, 0.25, 0.1, 0.05]) ** 2  # temperature 0.5
    assert emitted.log_probs == pytest.approx([math.log(weights[0] / weights.sum())])
    assert step(FakeEngine("t"), sequence()).log_probs is None


def test_unseen_counts_rolled_back_tokens():
    engine, seq = FakeEngine("t"), sequence()
    assert engine.unseen(seq) == len(PROMPT)
    ran = step(engine, seq, run=4).tokens
    seq.tokens += [*ran[:2], 1]
    assert engine.unseen(seq) == 1
    seq.tokens[-2] = 2
    assert engine.unseen(seq) == 2


def test_a_block_table_that_is_too_short_fails_that_turn_only():
    engine, short, fine = FakeEngine("t", kv_blocks=8), sequence(), sequence()
    fine.id, fine.blocks = 2, {"t": [0, 1]}
    engine.submit([Turn(short, len(PROMPT)), Turn(fine, len(PROMPT))])
    first, second = engine.poll(0.0)
    assert "block table of sequence 1 is too short" in first.error
    assert second.error is None
    assert len(second.tokens) == 1


def test_a_turn_that_follows_draws_what_one_at_a_time_would():
    """On a device: with tokens, a proposal made there, and log-probabilities."""
    draft = FakeEngine("d", agreement=0.6, seed=3, in_target=True)
    ahead, plain = FakeEngine("t", lookahead=1), FakeEngine("t")
    fast, slow = sequence(0.7, log_probs=True), sequence(0.7, log_probs=True)
    proposal = DeviceProposal(draft, length=3, nodes=5)
    ahead.submit([Turn(fast, len(PROMPT))])
    for _ in range(30):
        ahead.submit([Turn(fast, AFTER, device_proposal=proposal)])
        (done,) = ahead.poll(1.0)
        assert done.accepted == len(
            (done.drafted or NOTHING).first(done.verified).follow(done.tokens)
        )
        fast.tokens += done.tokens
        for log_prob in done.log_probs:
            alone = step(plain, slow)
            slow.tokens += alone.tokens
            assert alone.log_probs == [log_prob]
    assert fast.tokens == slow.tokens
    assert len(fast.tokens) > len(PROMPT) + 45
    assert ahead.unseen(fast) == 1


def test_the_oldest_of_two_submissions_is_polled_and_an_error_voids_both():
    engine, one, other = FakeEngine("t", lookahead=1), sequence(), sequence()
    other.id = 2
    engine.submit([Turn(one, len(PROMPT))])
    engine.submit([Turn(one, AFTER), Turn(other, len(PROMPT))])
    assert [done.sequence_id for done in engine.poll(1.0)] == [1]
    assert [done.sequence_id for done in engine.poll(1.0)] == [1, 2]
    engine.begin = lambda turns: 1 / 0
    engine.submit([Turn(one, AFTER)])
    engine.submit([Turn(other, AFTER)])
    with pytest.raises(ZeroDivisionError):
        engine.poll(1.0)
    assert engine.poll(1.0) == []


def test_what_a_cancelled_sequence_still_runs_is_discarded():
    engine, seq = FakeEngine("t", lookahead=1), sequence()
    engine.submit([Turn(seq, len(PROMPT))])
    engine.submit([Turn(seq, AFTER)])
    engine.cancel([seq.id])
    again = replace(seq, tokens=list(PROMPT))
    engine.submit([Turn(again, len(PROMPT))])
    assert [engine.poll(1.0), engine.poll(1.0)] == [[], []]
    assert engine.poll(1.0)[0].tokens == step(FakeEngine("t"), sequence()).tokens
