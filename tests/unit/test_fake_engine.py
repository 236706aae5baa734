import numpy as np
import pytest

from backend.engines.fake import FakeEngine
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams

PROMPT = list(b"once upon a time")


def sequence(temperature=0.0, seed=1, **options):
    return Sequence(1, list(PROMPT), len(PROMPT), SamplingParams(temperature, seed=seed, **options))


def step(engine, seq, k=0, **turn):
    engine.submit([Turn(seq, len(seq.tokens), **({"run": k, "keep_probs": True} if k else {}), **turn)])
    (completion,) = engine.poll(0.0)
    return completion


def test_greedy_speculation_emits_what_plain_decoding_emits():
    target, draft = FakeEngine("t"), FakeEngine("d", agreement=0.5, seed=3)
    plain, fast = sequence(), sequence()
    while len(plain.tokens) < 200:
        plain.tokens += step(target, plain).tokens
    target.cancel([1])
    accepted = 0
    while len(fast.tokens) < 200:
        proposal = step(draft, fast, k=4)
        verified = step(target, fast, proposal=Proposal("d", proposal.tokens, proposal.probs))
        accepted += verified.accepted
        assert len(verified.tokens) == verified.accepted + 1
        fast.tokens += verified.tokens
    assert fast.tokens[:200] == plain.tokens[:200]
    assert 20 < accepted < 150


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.7}])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_law_of_the_first_token_is_the_targets_whatever_the_draft(k, options):
    target, draft = FakeEngine("t"), FakeEngine("d", agreement=0.0, seed=5)
    law = target._law(PROMPT, SamplingParams(1.0, **options))
    counts, rounds = np.zeros(257), 3000
    for seed in range(rounds):
        seq = sequence(1.0, seed, **options)
        proposal = step(draft, seq, k=k) if k else None
        verified = step(target, seq, proposal=Proposal("d", proposal.tokens, proposal.probs) if proposal else None)
        counts[verified.tokens[0]] += 1
        target.cancel([1]), draft.cancel([1])
    support = law > 0
    assert counts[~support].sum() == 0
    chi_square = (((counts - rounds * law) ** 2)[support] / (rounds * law)[support]).sum()
    assert chi_square < 21.1  # 3 degrees of freedom, false alarm 1e-4


def test_unseen_counts_rolled_back_tokens():
    engine, seq = FakeEngine("t"), sequence()
    assert engine.unseen(seq) == len(PROMPT)
    ran = step(engine, seq, k=4).tokens
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
