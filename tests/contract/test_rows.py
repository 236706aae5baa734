"""Row i of a verification, or of a free run, decides as plain decoding does at that prefix: all options, rules and lengths crossed.

One contract for every engine that can be a target. Randomness is keyed by position, so a decision in a run has the very outcome that it has
alone, and the property needs no statistics.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.fake import VOCAB_SIZE, FakeEngine
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams
from tests.contract.deployment import K_MAX, VOCAB, tiny_engine
from tests.contract.trtllm_deployment import trtllm_engine

numbers = itertools.count(1)
KINDS = {
    "torch": (tiny_engine, VOCAB, range(VOCAB)),
    "fake": (lambda name: FakeEngine(name, kv_blocks=64, max_draft_tokens=K_MAX), VOCAB_SIZE, list(b"abcdefgh xyz")),
    "trtllm": (lambda name: trtllm_engine(tiny_engine(name), target=name == "target"), VOCAB, range(VOCAB)),
}
GREEDY_ONLY = ("trtllm",)
"""Kinds whose random numbers are not keyed by position (their sampling is checked in law), whose turns stop behind an end token (so here
there is none), and whose log-probabilities are those of fp32 logits."""


@st.composite
def samplings(draw, likely, greedy_only):
    tokens = st.sampled_from(likely)
    options = {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.8, 1.4])),
        "presence_penalty": draw(st.sampled_from([0.0, -0.4, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.3])),
        "min_tokens": draw(st.integers(0, 6)),
        "end_ids": tuple(draw(st.lists(tokens, max_size=6))),
        "bad_words": tuple(tuple(word) for word in draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=8))),
        "bias": tuple(draw(st.lists(st.tuples(tokens, st.floats(-4.0, 30.0)), max_size=3))),
        "log_probs": True,
    }
    if greedy_only:
        options["end_ids"] = ()
    if greedy_only or draw(st.booleans()):
        return SamplingParams(**options)
    law = {"temperature": draw(st.floats(0.3, 2.0)), "top_k": draw(st.integers(0, 8)), "top_p": draw(st.floats(0.3, 1.0))}
    return SamplingParams(**law, seed=draw(st.integers(0, 2**64 - 1)), **options)


def complete(engine, sequence, tokens, **turn):
    """Run one turn behind ``tokens`` as a sequence of its own, in which all but the prompt counts as output."""
    alone = replace(sequence, id=next(numbers), tokens=list(tokens))
    engine.submit([Turn(alone, len(tokens), **turn)])
    (completion,) = engine.poll(0.0)
    engine.cancel([alone.id])
    assert completion.error is None
    return completion


def sequence_of(data, likely, greedy_only):
    prompt = data.draw(st.lists(st.sampled_from(likely), min_size=1, max_size=20), label="prompt")
    output = data.draw(st.lists(st.sampled_from(likely), max_size=8), label="output")
    sampling = data.draw(samplings(likely, greedy_only), label="sampling")
    blocks = {name: [0, 1, 2] for name in ("target", "draft")}
    return Sequence(0, [*prompt, *output], len(prompt), sampling, blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_in_a_run_is_the_one_that_is_made_alone(kind):
    new_engine, vocab, likely = KINDS[kind]
    target = new_engine("target")

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def holds(data):
        sequence = sequence_of(data, likely, kind in GREEDY_ONLY)
        proposed = []
        for _ in range(data.draw(st.integers(0, K_MAX), label="k")):
            guess = complete(target, sequence, [*sequence.tokens, *proposed]).tokens
            proposed += guess if data.draw(st.booleans(), label="right") else [data.draw(st.integers(0, vocab - 1), label="guess")]
        together = complete(target, sequence, sequence.tokens, proposal=Proposal.chain("d", proposed))
        assert together.tokens[: together.accepted] == proposed[: together.accepted]
        assert len(together.tokens) == len(together.log_probs) == together.accepted + 1
        for row, (token, log_prob) in enumerate(zip(together.tokens, together.log_probs, strict=True)):
            proposal = Proposal.chain("d", proposed[row : row + 1]) if row < len(proposed) else None
            alone = complete(target, sequence, [*sequence.tokens, *proposed[:row]], proposal=proposal)
            assert (alone.tokens[0], alone.accepted) == (token, int(row < together.accepted))
            assert alone.log_probs[0] == pytest.approx(log_prob, abs=1e-5 if kind in GREEDY_ONLY else 1e-9)
            plain = complete(target, sequence, [*sequence.tokens, *together.tokens[:row]])
            assert plain.tokens == [token]

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_s_spine_is_its_free_run_which_its_copy_as_target_accepts_whole(kind):
    new_engine, _, likely = KINDS[kind]
    target, draft = new_engine("target"), new_engine("draft")

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def holds(data):
        sequence = sequence_of(data, likely, greedy_only=True)  # drawn ones: a tail is not proposed
        k = data.draw(st.integers(1, K_MAX), label="k")
        run = complete(draft, sequence, sequence.tokens, run=k)
        tree = complete(draft, sequence, sequence.tokens, run=k, nodes=99).proposal
        assert tree.spine().tokens == run.tokens
        verified = complete(target, sequence, sequence.tokens, proposal=tree.spine())
        assert verified.accepted == k
        assert verified.tokens[-1:] == complete(target, sequence, [*sequence.tokens, *run.tokens]).tokens

    holds()
