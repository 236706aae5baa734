import math
import random
from dataclasses import replace

import numpy as np
import pytest

from backend.engines.fake import FakeEngine, _log_softmax, _processed
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams
from tests.options import processed

PROMPT = list(b"once upon a time")


def sequence(temperature=0.0, seed=1, **options):
    return Sequence(1, list(PROMPT), len(PROMPT), SamplingParams(temperature, seed=seed, **options))


def step(engine, seq, k=0, **turn):
    engine.submit([Turn(seq, len(seq.tokens), **({"run": k, "keep_probs": True} if k else {}), **turn)])
    (completion,) = engine.poll(0.0)
    return completion


def chi_square(counts, law):
    support = law > 1e-6  # the four letters
    assert counts[~support].sum() == 0
    expected = counts.sum() * law[support]
    return ((counts[support] - expected) ** 2 / expected).sum()


def decode(seq, tokens, draft=None, rng=None):
    """Return the log-probabilities of plain decoding, or of speculation with random lengths."""
    target, log_probs = FakeEngine("t"), []
    while len(seq.tokens) < len(PROMPT) + tokens:
        k = rng.randint(0, 4) if draft else 0
        proposal = step(draft, seq, k=k) if k else None
        verified = step(target, seq, proposal=Proposal("d", proposal.tokens, proposal.probs) if proposal else None)
        assert len(verified.tokens) == verified.accepted + 1
        seq.tokens += verified.tokens
        log_probs += verified.log_probs
        seq.attempt += 1
    return log_probs


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.7}])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_law_of_the_first_token_is_the_targets_whatever_the_draft(k, options):
    target, draft = FakeEngine("t"), FakeEngine("d", agreement=0.0, seed=5)
    law, _ = target._law(PROMPT, sequence(1.0, **options))
    counts, rounds = np.zeros(257), 3000
    for seed in range(rounds):
        seq = sequence(1.0, seed, **options)
        proposal = step(draft, seq, k=k) if k else None
        verified = step(target, seq, proposal=Proposal("d", proposal.tokens, proposal.probs) if proposal else None)
        counts[verified.tokens[0]] += 1
        target.cancel([1]), draft.cancel([1])
    assert chi_square(counts, law) < 21.1  # 3 degrees of freedom, false alarm 1e-4


def test_the_law_of_plan_invariant_tokens_is_the_targets_and_the_draft_gives_no_law():
    draft, counts = FakeEngine("d", agreement=0.0, seed=5), np.zeros(257)
    for seed in range(2000):
        seq = sequence(1.0, seed, coupled=True)
        proposal = step(draft, seq, k=1)
        assert proposal.probs is None
        counts[step(FakeEngine("t"), seq, proposal=Proposal("d", proposal.tokens)).tokens[0]] += 1
    assert chi_square(counts, FakeEngine("t")._law(PROMPT, sequence(1.0))[0]) < 21.1  # 3 degrees of freedom, false alarm 1e-4


OPTIONS = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "min_tokens": 9,
    "end_ids": (*b"aeiou", 256),
    "bad_words": (tuple(b"e"), tuple(b"ea"), tuple(b"me "), (*PROMPT[-2:], ord("r"))),
    "bias": ((ord("!"), 27.5), (ord("q"), -1.0)),
}


def crossed():
    """Sets of options: each alone, then random mixes of them."""
    rng = random.Random(3)
    mixes = [dict(rng.sample(sorted(OPTIONS.items()), rng.randint(2, 7))) for _ in range(20)]
    return [{name: value} for name, value in OPTIONS.items()] + mixes


@pytest.mark.parametrize(
    "mode", [(0.0, {}), (0.7, {"top_k": 1}), (0.7, {"coupled": True}), (1.5, {"coupled": True, "top_p": 0.8, "top_k": 3})]
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
def test_the_options_change_the_law_as_documented(temperature):
    context = PROMPT + list(b"eeab")
    for options in crossed():
        made = sequence(temperature, **options)
        before = FakeEngine("t")._law(context, sequence(1.0))[1] + 3.0  # logits of any level
        expected = processed(before, context, len(PROMPT), made.sampling)
        found = _log_softmax(_processed(before.copy(), context, made))
        assert found == pytest.approx(expected - np.log(np.exp(expected).sum()), abs=1e-9), options


def test_log_probabilities_are_of_the_law_before_top_k_and_top_p():
    seq = sequence(0.5, top_k=1, top_p=0.1, log_probs=True)
    emitted = step(FakeEngine("t"), seq)
    weights = np.array([0.6, 0.25, 0.1, 0.05]) ** 2  # temperature 0.5
    assert emitted.log_probs == pytest.approx([math.log(weights[0] / weights.sum())])
    assert step(FakeEngine("t"), sequence()).log_probs is None


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
