"""A draft that catches up on text emitted without it is credited with what it would have had
accepted of it, chain by chain.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.engines.port import Turn
from backend.engines.stepping.counterfactual import DRAWN_ROWS, SCORED_ROWS, chains
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from policy import NO_DRAFT
from tests.contract.deployment import K_MAX, Deployment, Scripted, tiny_config, tiny_engine
from tests.contract.scenarios import PROMPTS

numbers = itertools.count(10**6)
ALL_NODES = 99
BLOCKS = {"target": list(range(4)), "draft": list(range(4))}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.9, top_k=9, seed=5),
    "greedy with options": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.2, bad_words=((7,), (3, 20)), bias=((2, 1.0),)
    ),
    "sampled with options": SamplingParams(
        1.2, seed=8, presence_penalty=0.5, min_tokens=40, end_ids=(1, 2)
    ),
}
DRAFTS = {
    "near": lambda: tiny_engine("draft", seed=1, noise=0.06),
    "shallow": lambda: tiny_engine("draft", config=tiny_config(layers=1), seed=2, noise=0.05),
}


def complete(engine, sequence, **turn):
    engine.submit([Turn(sequence, len(sequence.tokens), **turn)])
    (completion,) = engine.poll(0.0)
    assert completion.error is None
    return completion


def alone(engine, sequence, end, **turn):
    """The engine's state after the first ``end`` tokens when it has just read them."""
    other = replace(sequence, id=next(numbers), tokens=sequence.tokens[:end])
    completion = complete(engine, other, **turn)
    engine.cancel([other.id])
    return completion.proposal.spine().tokens


def emit(sequence, count):
    """Commit ``count`` tokens of plain decoding, as a target does that needs no draft."""
    target = tiny_engine()
    for _ in range(count):
        sequence.tokens += complete(target, sequence).tokens


def replayed(draft, sequence, begin, k=K_MAX):
    """The chains that the draft proposes when it speculates from ``begin`` to the end of the
    text.
    """
    found, at, tokens = [], begin, sequence.tokens
    while at < len(tokens):
        length = min(k, len(tokens) - at)
        proposed = alone(draft, sequence, at, run=length, nodes=ALL_NODES)
        accepted = next((j for j in range(length) if proposed[j] != tokens[at + j]), length)
        found.append((accepted, length))
        at += accepted + 1
    return found


def new_sequence(sampling, prompt=(3, 1, 4, 1, 5)):
    return Sequence(
        next(numbers),
        list(prompt),
        len(prompt),
        sampling,
        {name: list(table) for name, table in BLOCKS.items()},
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_draft_that_was_idle_is_credited_with_exactly_the_chains_of_a_replay(draft, sampling):
    draft, sequence = DRAFTS[draft](), new_sequence(SAMPLINGS[sampling])
    emit(sequence, 3)
    first = complete(draft, sequence, run=2, nodes=ALL_NODES)
    assert first.scored == replayed(draft, sequence, 5)  # all three tokens of the output so far
    text = Sequence(0, [*sequence.tokens], 5, sequence.sampling, BLOCKS)
    emit(text, 3)
    accepted = len(first.proposal.follow(text.tokens[8:]))
    emit(sequence, accepted + 1)  # the step that it proposed in
    begin = len(sequence.tokens)
    emit(sequence, 20)
    found = complete(draft, sequence, run=3, nodes=ALL_NODES)
    assert found.proposal.spine().tokens == alone(
        draft, sequence, begin + 20, run=3, nodes=ALL_NODES
    )
    rows = 20 if sequence.sampling.greedy else SCORED_ROWS // DRAWN_ROWS
    assert found.scored == replayed(draft, sequence, begin + 20 - rows)


def test_a_draft_in_use_is_never_credited_twice():
    draft, sequence = (
        tiny_engine("draft"),
        new_sequence(SamplingParams()),
    )  # a copy: everything is accepted
    for _ in range(4):
        completion = complete(draft, sequence, run=3, nodes=ALL_NODES)
        assert completion.scored == []
        emit(sequence, 4)


def test_prompt_tokens_are_not_scored():
    draft = DRAFTS["near"]()
    sequence = new_sequence(SamplingParams(), range(20))
    assert complete(draft, sequence, run=2, nodes=ALL_NODES).scored == []


def test_a_submission_scores_a_bounded_number_of_the_last_tokens(monkeypatch):
    monkeypatch.setattr("backend.engines.stepping.engine.SCORED_ROWS", 12)
    draft, made = DRAFTS["near"](), []
    for _ in range(2):
        sequence = new_sequence(SamplingParams())
        sequence.blocks["draft"] = [4 * len(made) + n for n in range(4)]
        emit(sequence, 8)
        made.append(sequence)
    draft.submit(
        [Turn(sequence, len(sequence.tokens), run=1, nodes=ALL_NODES) for sequence in made]
    )
    first, second = draft.poll(0.0)
    assert first.scored == replayed(draft, made[0], 5)
    assert second.scored == replayed(draft, made[1], 9)
    spines = [each.proposal.spine().tokens for each in (first, second)]
    assert spines == [alone(draft, made[0], 13, run=1, nodes=ALL_NODES)] * 2


def test_the_policy_learns_what_an_unused_draft_would_have_had_accepted():
    script = [(0, 2), *[(NO_DRAFT, 0)] * 9, (0, 3), (NO_DRAFT, 0)]
    deployment = Deployment(tiny_engine(), [DRAFTS["near"]()], Scripted(script), chunk_tokens=64)
    session = deployment.submit(PROMPTS[0], 40)
    deployment.run()
    done = own_end = len(PROMPTS[0])
    observed = []
    for outcome in deployment.policy.outcomes:
        if outcome.rows.length.any():
            text = Sequence(
                0, session.sequence.tokens[:done], len(PROMPTS[0]), SamplingParams(), BLOCKS
            )
            observed += zip(
                outcome.free.accepted.tolist(), outcome.free.scored.tolist(), strict=True
            )
            assert observed[len(observed) - len(outcome.free.scored) :] == replayed(
                DRAFTS["near"](), text, own_end
            )
            assert set(outcome.free.request.tolist()) <= {session.id}
            assert not outcome.free.draft.any()
            own_end = done + int(outcome.rows.emitted[0])
        else:
            assert not len(outcome.free.request)
        done += int(outcome.rows.emitted.sum())
    assert sum(length for _, length in observed) > 20


@pytest.mark.parametrize(
    ("guessed", "emitted", "expected"),
    [
        ([], [], []),
        ([1, 2, 3], [1, 2, 3], [(3, 3)]),
        (
            [1, 2, 3, 4, 5, 6],
            [1, 2, 3, 4, 9, 6],
            [(4, 4), (1, 1)],
        ),  # the fifth is the target's bonus
        ([9, 9, 9], [1, 2, 3], [(0, 3), (0, 2), (0, 1)]),
        (
            [1, 9, 3, 4, 5, 6, 7],
            [1, 2, 3, 4, 5, 6, 7],
            [
                (1, 4),
                (4, 4),
            ],
        ),
    ],
)
def test_emitted_tokens_are_cut_into_the_chains_that_guesses_would_have_made(
    guessed, emitted, expected
):
    assert chains(guessed, emitted, 4) == expected


def test_scoring_changes_no_kv():
    draft, sequence = DRAFTS["near"](), new_sequence(SamplingParams())
    emit(sequence, 20)
    fresh = replace(
        sequence, id=next(numbers), prompt_tokens=25, blocks={"draft": list(range(4, 8))}
    )  # all of it is prompt: nothing is scored
    scored, plain = (complete(draft, each, run=1, nodes=ALL_NODES) for each in (sequence, fresh))
    assert scored.scored
    assert not plain.scored
    assert scored.proposal.tokens == plain.proposal.tokens
    assert scored.proposal.parents == plain.proposal.parents
    firsts = (0, 4 * BLOCK_TOKENS)
    kv = [
        torch.stack([p[first : first + 25] for layer in draft.model.pools.values() for p in layer])
        for first in firsts
    ]
    assert np.allclose(*kv, atol=1e-12)
