"""A verification accepts and draws what plain decoding draws, token by token: all options,
lengths and trees crossed.

One contract for every engine that can be a target. Noise is keyed by position, so a decision in a
run has the very outcome that it has alone, and the property needs no statistics.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import ROOT, Proposal, Sequence
from tests.contract.deployment import K_MAX, VOCAB, tiny_engine
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.markov import VOCAB_SIZE

numbers = itertools.count(1)
KINDS = {
    "torch": (tiny_engine, VOCAB, range(VOCAB)),
    "fake": (
        lambda name: FakeEngine(name, kv_blocks=64, max_draft_tokens=K_MAX),
        VOCAB_SIZE,
        list(b"abcdefgh xyz"),
    ),
}
MOST_NODES = 7


@st.composite
def samplings(draw, likely):
    tokens = st.sampled_from(likely)
    options = {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.8, 1.4])),
        "presence_penalty": draw(st.sampled_from([0.0, -0.4, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.3])),
        "prompt_ignore_length": draw(st.sampled_from([0, 3, 2**31 - 1])),
        "min_tokens": draw(st.integers(0, 6)),
        "end_ids": tuple(draw(st.lists(tokens, max_size=6))),
        "bad_words": tuple(
            tuple(word)
            for word in draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=8))
        ),
        "bias": tuple(draw(st.lists(st.tuples(tokens, st.floats(-4.0, 30.0)), max_size=3))),
        "log_probs": True,
    }
    if draw(st.booleans()):
        return SamplingParams(**options)
    filters = {
        "temperature": draw(st.floats(0.3, 2.0)),
        "top_k": draw(st.integers(0, 8)),
        "top_p": draw(st.floats(0.3, 1.0)),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
    }
    return SamplingParams(**filters, seed=draw(st.integers(0, 2**64 - 1)), **options)


def complete(engine, sequence, tokens, **turn):
    """Run one turn after ``tokens`` as a sequence of its own, in which all but the prompt counts
    as output.
    """
    alone = replace(sequence, id=next(numbers), tokens=list(tokens))
    engine.submit([Turn(alone, len(tokens), **turn)])
    (completion,) = engine.poll(0.0)
    engine.cancel([alone.id])
    assert completion.error is None
    return completion


def sequence_of(data, likely):
    prompt = data.draw(st.lists(st.sampled_from(likely), min_size=1, max_size=20), label="prompt")
    output = data.draw(st.lists(st.sampled_from(likely), max_size=8), label="output")
    sampling = data.draw(samplings(likely), label="sampling")
    blocks = {name: [0, 1, 2] for name in ("target", "draft")}
    return Sequence(0, [*prompt, *output], len(prompt), sampling, blocks)


def tree_of(data, vocab, target, sequence):
    """A tree whose tokens are here and there what the target draws after their path."""
    nodes, paths = [], {ROOT: []}
    for _ in range(data.draw(st.integers(0, MOST_NODES), label="nodes")):
        last = len(nodes) - 1
        parent = data.draw(st.integers(ROOT, last), label="parent") if target.limits.tree else last
        before = [*sequence.tokens, *paths[parent]]
        if data.draw(st.booleans(), label="right"):
            (token,) = complete(target, sequence, before).tokens
        else:
            token = data.draw(st.integers(0, vocab - 1), label="guess")
        if len(paths[parent]) < K_MAX and (token, parent) not in nodes:
            paths[len(nodes)] = [*paths[parent], token]
            nodes.append((token, parent))
    return Proposal("d", [t for t, _ in nodes], [p for _, p in nodes], [1.0] * len(nodes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_in_a_run_is_the_one_that_is_made_alone(kind):
    new_engine, vocab, likely = KINDS[kind]
    target = new_engine("target")

    @settings(max_examples=100)
    @given(st.data())
    def holds(data):
        sequence = sequence_of(data, likely)
        proposal = tree_of(data, vocab, target, sequence)
        together = complete(target, sequence, sequence.tokens, proposal=proposal)
        assert together.accepted == len(proposal.follow(together.tokens))
        assert len(together.tokens) == len(together.log_probs) == together.accepted + 1
        for row, (token, log_prob) in enumerate(
            zip(together.tokens, together.log_probs, strict=True)
        ):
            alone = complete(target, sequence, [*sequence.tokens, *together.tokens[:row]])
            assert alone.tokens == [token]
            assert alone.log_probs == pytest.approx([log_prob], abs=1e-9)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_is_a_tree_along_single_steps_and_its_copy_as_target_accepts_it_whole(kind):
    new_engine, _, likely = KINDS[kind]
    target, draft = new_engine("target"), new_engine("draft")

    @settings(max_examples=75)
    @given(st.data())
    def holds(data):
        sequence = sequence_of(data, likely)
        k = data.draw(st.integers(1, K_MAX), label="k")
        nodes = data.draw(st.integers(1, MOST_NODES), label="nodes")
        made = complete(draft, sequence, sequence.tokens, run=k, nodes=nodes).proposal
        assert is_tree(made)
        assert len(made) <= nodes
        assert made.depth <= k
        spine = made.spine()
        for row, token in enumerate(spine.tokens):
            before = [*sequence.tokens, *spine.tokens[:row]]
            assert complete(draft, sequence, before, run=1, nodes=1).proposal.tokens == [token]
        if sequence.sampling.greedy:
            verified = made if target.limits.tree else spine
            found = complete(target, sequence, sequence.tokens, proposal=verified)
            assert found.accepted == made.depth == len(spine)

    holds()


def is_tree(proposal):
    """Whether parents come first, no two children of one are equal, and confidence never rises."""
    edges = set(zip(proposal.parents, proposal.tokens, strict=True))
    first = all(ROOT <= parent < node for node, parent in enumerate(proposal.parents))
    falls = all(a >= b for a, b in itertools.pairwise([1.0, *proposal.confidence]))
    return first and falls and len(edges) == len(proposal)
