"""Greedy text is the same under any draft, length, chunking and batch: exactly, in fp64, through TorchEngine on both sides."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.checkpoint import LlamaConfig
from backend.engines.torch_engine import TorchEngine
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams

VOCAB, K_MAX, NEW_TOKENS = 24, 5, 10
CONFIG = LlamaConfig(VOCAB, 16, 24, 2, 4, 2, 4)


def random_weights(config, seed, noise=0.0):
    """Weights of one seed, moved by noise of another: a draft that agrees with the target now and then."""
    kinds = [torch.Generator().manual_seed(number) for number in (0, seed)]
    first, second = ({n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in CONFIG.shapes().items()} for g in kinds)
    weights = {name: 0.5 * (first[name] + noise * second[name]) for name in first}
    if config.draft_vocab_size:
        ids = torch.randperm(VOCAB, generator=kinds[1])[: config.draft_vocab_size]
        weights |= {"lm_head.weight": weights["lm_head.weight"][ids], "lm_head.token_ids": ids}
    return weights


def new_engine(name, seed=0, noise=0.0, shortlist=0):
    config = LlamaConfig(VOCAB, 16, 24, 2, 4, 2, 4, draft_vocab_size=shortlist)
    weights = random_weights(config, seed, noise)
    return TorchEngine.from_weights(name, config, weights, kv_blocks=12, max_context_tokens=64, max_draft_tokens=K_MAX)


TARGET = new_engine("target")
DRAFTS = {"twin": new_engine("twin"), "near": new_engine("near", 1, 0.05), "short": new_engine("short", 2, 0.05, 15)}
SOURCES = [*DRAFTS, "liar"]
PROMPTS = [[1, 2, 3], [7] * 17, [5, 9, 11, 2, 0, 4]]
numbers = itertools.count(1)


def complete(engine, turns):
    engine.submit(turns)
    completions = {completion.sequence_id: completion for completion in engine.poll(0.0)}
    assert not any(completion.error for completion in completions.values()), completions
    return completions


def plain(prompt):
    sequence = Sequence(next(numbers), list(prompt), len(prompt), SamplingParams(), {"target": [0, 1, 2]})
    while len(sequence.tokens) < len(prompt) + NEW_TOKENS:
        sequence.tokens += complete(TARGET, [Turn(sequence, len(sequence.tokens))])[sequence.id].tokens
    TARGET.cancel([sequence.id])
    return sequence.tokens


EXPECTED = [plain(prompt) for prompt in PROMPTS]


def propose(choices):
    """What the chosen sources propose for (sequence, source, k), k > 0: a draft's free run, or tokens that are always wrong."""
    proposals = {}
    for name, engine in DRAFTS.items():
        turns = [Turn(s, len(s.tokens), run=k, keep_probs=True) for s, source, k in choices if source == name and k]
        for sequence_id, completion in complete(engine, turns).items():
            proposals[sequence_id] = Proposal(name, completion.tokens, completion.probs)
    for sequence, source, k in choices:
        if source == "liar" and k:
            truth = EXPECTED[PROMPTS.index(sequence.tokens[: sequence.prompt_tokens])]
            at = len(sequence.tokens)
            wrong = [(truth[min(p, len(truth) - 1)] + 1) % VOCAB for p in range(at, at + k)]
            proposals[sequence.id] = Proposal("liar", wrong)
    return proposals


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_greedy_text_does_not_depend_on_drafts_lengths_chunks_or_batches(data):
    tables = data.draw(st.permutations(range(12)), label="blocks")
    sequences = []
    for index, prompt in enumerate(PROMPTS):
        blocks = tables[4 * index : 4 * index + 4]
        sequences.append(
            Sequence(next(numbers), list(prompt), len(prompt), SamplingParams(), {n: list(blocks) for n in ("target", *DRAFTS)})
        )
    try:
        while unfinished := [s for s in sequences if len(s.tokens) < s.prompt_tokens + NEW_TOKENS]:
            step(data, unfinished)
    finally:
        for engine in (TARGET, *DRAFTS.values()):
            engine.cancel([s.id for s in sequences])
    for sequence, expected in zip(sequences, EXPECTED, strict=True):
        assert sequence.tokens[: len(expected)] == expected


def step(data, unfinished):
    present = [s for s in unfinished if data.draw(st.booleans(), label="present")] or unfinished[:1]
    choices, turns = [], []
    for sequence in present:
        unseen = TARGET.unseen(sequence)
        if unseen > 1 and data.draw(st.booleans(), label="prefill"):
            end = len(sequence.tokens) - unseen + data.draw(st.integers(1, unseen), label="chunk")
            turns.append(Turn(sequence, end, run=0))
        else:
            choices.append((sequence, data.draw(st.sampled_from(SOURCES), label="source"), data.draw(st.integers(0, K_MAX), label="k")))
    proposals = propose(choices)
    turns += [Turn(sequence, len(sequence.tokens), proposal=proposals.get(sequence.id)) for sequence, _, _ in choices]
    completions = complete(TARGET, turns)
    for sequence, source, k in choices:
        completion = completions[sequence.id]
        assert len(completion.tokens) == completion.accepted + 1
        assert completion.accepted == {"twin": k, "liar": 0}.get(source, completion.accepted)
        sequence.tokens += completion.tokens
        sequence.attempt += 1
        assert TARGET.unseen(sequence) == 1


def test_every_draft_is_right_now_and_then_and_only_the_twin_always():
    accepted = {name: [] for name in DRAFTS}
    for name, engine in DRAFTS.items():
        sequence = Sequence(next(numbers), list(PROMPTS[0]), 3, SamplingParams(), {"target": [0, 1, 2], name: [3, 4, 5]})
        while len(sequence.tokens) < 3 + NEW_TOKENS:
            drafted = complete(engine, [Turn(sequence, len(sequence.tokens), run=2)])[sequence.id].tokens
            completion = complete(TARGET, [Turn(sequence, len(sequence.tokens), proposal=Proposal(name, drafted))])[sequence.id]
            sequence.tokens += completion.tokens
            accepted[name].append(completion.accepted)
        engine.cancel([sequence.id])
        TARGET.cancel([sequence.id])
    assert set(accepted["twin"]) == {2}
    assert all(0 < sum(accepted[name]) < 2 * len(accepted[name]) for name in ("near", "short"))
