from dataclasses import replace

import pytest

from backend.engines.port import AFTER, DeviceProposal, Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from tests.fakes.fake_engine import FakeEngine

PROMPT = list(b"once upon a time")
NOTHING = Proposal.chain("d", [])


def sequence(temperature=0.0, seed=1, **options):
    return Sequence(1, list(PROMPT), len(PROMPT), SamplingParams(temperature, seed=seed, **options))


def step(engine, seq, k=0, nodes=0, **turn):
    asked = {"run": k, "nodes": nodes or k} if k else {}
    engine.submit([Turn(seq, len(seq.tokens), **asked, **turn)])
    (completion,) = engine.poll(0.0)
    return completion


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
