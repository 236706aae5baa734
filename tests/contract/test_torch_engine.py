"""The port's promises, kept by TorchEngine as target and as draft (a tiny random model in fp64)."""

import itertools

import pytest
import torch

from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from tests.contract.deployment import MAX_CONTEXT_TOKENS, tiny_config, tiny_engine

VOCAB, KV_BLOCKS = 40, 24


def new_engine(name="target"):
    return tiny_engine(name, config=tiny_config(VOCAB), kv_blocks=KV_BLOCKS)


@pytest.fixture
def engine():
    return new_engine()


numbers = itertools.count(1)


def new_sequence(*, prompt=(3, 1, 4, 1, 5), blocks=(0, 1, 2), sampling=None, name="target"):
    return Sequence(
        next(numbers), list(prompt), len(prompt), sampling or SamplingParams(), {name: list(blocks)}
    )


def step(engine, *turns):
    engine.submit(turns)
    completions = {completion.sequence_id: completion for completion in engine.poll(0.0)}
    return [completions[turn.sequence.id] for turn in turns]


def plain(engine, sequence, count):
    """The next ``count`` tokens by plain decoding, committed."""
    for _ in range(count):
        (completion,) = step(engine, Turn(sequence, len(sequence.tokens)))
        assert completion.error is None
        sequence.tokens += completion.tokens
    return sequence.tokens[-count:]


def kv(engine, sequence, count):
    """The keys and values of the first ``count`` positions, in every layer."""
    slots = [
        sequence.blocks[engine.name][p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
        for p in range(count)
    ]
    return torch.stack([pool[slots] for layer in engine.model.pools.values() for pool in layer])


def test_an_idle_engine_completes_nothing(engine):
    assert engine.poll(0.0) == []


def test_a_prefill_chunk_emits_nothing_and_is_seen(engine):
    sequence = new_sequence()
    assert engine.unseen(sequence) == 5
    (completion,) = step(engine, Turn(sequence, 3, run=0))
    assert (completion.tokens, completion.error) == ([], None)
    assert engine.unseen(sequence) == 2


def test_a_fully_prefilled_sequence_still_decodes(engine):
    sequence, other = new_sequence(), new_sequence(blocks=(3, 4))
    step(engine, Turn(sequence, 5, run=0))
    assert engine.unseen(sequence) == 0
    assert plain(engine, sequence, 3) == plain(engine, other, 3)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_oracle_s_proposal_is_accepted_whole_with_a_bonus_token(engine, k):
    expected = plain(engine, new_sequence(), 20)
    sequence = new_sequence(blocks=(5, 9, 7))
    for _ in range(3):
        done = len(sequence.tokens) - 5
        proposal = Proposal.chain("oracle", expected[done : done + k])
        (completion,) = step(engine, Turn(sequence, len(sequence.tokens), proposal=proposal))
        assert completion.accepted == k
        assert completion.tokens == expected[done : done + k + 1]
        sequence.tokens += completion.tokens
        assert engine.unseen(sequence) == 1


@pytest.mark.parametrize("right", [0, 1, 2])
def test_kv_after_a_rollback_equals_a_fresh_prefill(engine, right):
    expected = plain(engine, new_sequence(), 6)
    sequence = new_sequence(blocks=(9, 5, 6))
    tokens = [*expected[:right], *((token + 1) % VOCAB for token in expected[right:4])]
    (completion,) = step(engine, Turn(sequence, 5, proposal=Proposal.chain("d", tokens)))
    assert completion.tokens == expected[: right + 1]
    sequence.tokens += completion.tokens
    assert engine.unseen(sequence) == 1
    plain(engine, sequence, 2)
    fresh = new_sequence(prompt=sequence.tokens, blocks=(12, 13))
    step(engine, Turn(fresh, len(fresh.tokens), run=0))
    seen = len(sequence.tokens) - engine.unseen(sequence)
    assert torch.allclose(kv(engine, sequence, seen), kv(engine, fresh, seen), atol=1e-12)


def test_a_free_run_equals_as_many_single_steps_and_its_own_tokens_need_no_catch_up(engine):
    expected = plain(engine, new_sequence(), 6)
    sequence = new_sequence(blocks=(3, 4, 5))
    (completion,) = step(engine, Turn(sequence, 5, run=4))
    assert completion.tokens == expected[:4]
    sequence.tokens += [*completion.tokens[:2], (completion.tokens[2] + 1) % VOCAB]
    assert engine.unseen(sequence) == 1
    full = new_sequence(blocks=(6, 7, 8))
    step(engine, Turn(full, 5, run=4))
    full.tokens += expected[:5]  # all four and one more
    assert engine.unseen(full) == 2
    assert plain(engine, full, 1) == expected[5:]


def test_free_runs_of_different_lengths_share_their_passes(engine):
    expected = plain(engine, new_sequence(), 4)
    turns = [
        Turn(new_sequence(blocks=(3 * i + 3, 3 * i + 4)), 5, run=run)
        for i, run in enumerate((1, 4, 2, 0))
    ]
    assert [completion.tokens for completion in step(engine, *turns)] == [
        expected[:1],
        expected[:4],
        expected[:2],
        [],
    ]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.9, seed=3)], ids=["greedy", "sampled"]
)
def test_a_draft_s_tree_is_its_free_run_with_its_next_choices_around_it(sampling):
    draft = new_engine("draft")
    (run,) = step(draft, Turn(new_sequence(sampling=sampling, name="draft"), 5, run=3))
    turn = Turn(new_sequence(sampling=sampling, name="draft", blocks=(5, 6)), 5, run=3, nodes=99)
    (drafted,) = step(draft, turn)
    tree = drafted.proposal
    assert (drafted.tokens, tree.spine().tokens) == ([], run.tokens)
    assert len(tree) > 3
    assert set(tree.parents) <= {-1, *tree.follow(run.tokens)}  # leaves off the spine
    banned = []
    for token in [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]:
        options = SamplingParams(sampling.temperature, seed=3, bad_words=tuple(banned))
        again = new_sequence(sampling=options, name="draft", blocks=(7, 8))
        assert step(draft, Turn(again, 5, run=1, nodes=1))[0].proposal.tokens == [token]
        banned.append((token,))


def test_a_draft_has_the_kv_of_its_own_spine():
    draft, sequence = new_engine("draft"), new_sequence(name="draft")
    (drafted,) = step(draft, Turn(sequence, 5, run=4, nodes=2))
    spine = plain(new_engine(), new_sequence(), 4)
    assert drafted.proposal.tokens[0] == spine[0]
    sequence.tokens += spine  # also what was not verified
    assert draft.unseen(sequence) == 1


BRANCHES = {  # nodes as (token of the text or a wrong one, parent), and how many are accepted
    "a sibling of the root's first": (lambda t: [(wrong(t[0]), -1), (7, 0), (t[0], -1)], 1),
    "a leaf after the spine": (lambda t: [(t[0], -1), (wrong(t[1]), 0), (t[1], 0)], 2),
    "another branch to its end": (
        lambda t: [
            (wrong(t[0]), -1),
            (t[0], -1),
            (t[1], 0),
            (t[1], 1),
            (t[2], 2),
            (wrong(t[2]), 3),
            (t[2], 3),
        ],
        3,
    ),
    "the first of two": (
        lambda t: [(t[0], -1), (t[1], 0), (wrong(t[0]), -1), (t[1], 2), (t[2], 1)],
        3,
    ),
    "nothing": (lambda t: [(wrong(t[0]), -1), (t[1], 0), (t[2], 1)], 0),
    "no nodes": (lambda t: [], 0),
}


def wrong(token):
    return (token + 1) % VOCAB


def branches(name, text):
    nodes = BRANCHES[name][0](text)
    return Proposal("d", [t for t, _ in nodes], [p for _, p in nodes], [1.0] * len(nodes))


@pytest.mark.parametrize("name", BRANCHES)
def test_what_is_accepted_has_the_kv_of_a_fresh_prefill_and_text_goes_on_as_without(engine, name):
    expected = plain(engine, new_sequence(), 8)
    sequence, accepted = new_sequence(blocks=(5, 9, 7)), BRANCHES[name][1]
    (completion,) = step(engine, Turn(sequence, 5, proposal=branches(name, expected)))
    assert completion.accepted == accepted
    assert completion.tokens == expected[: accepted + 1]
    sequence.tokens += completion.tokens
    assert engine.unseen(sequence) == 1
    fresh = new_sequence(prompt=sequence.tokens, blocks=(12, 13))
    step(engine, Turn(fresh, len(fresh.tokens), run=0))
    seen = len(sequence.tokens) - 1
    assert torch.allclose(kv(engine, sequence, seen), kv(engine, fresh, seen), atol=1e-12)
    plain(engine, sequence, 8 - len(completion.tokens))
    assert sequence.tokens[5:] == expected


def test_trees_chains_and_prompts_share_a_pass(engine):
    text = plain(engine, new_sequence(), 4)
    rows = {name: new_sequence(blocks=(3 * n, 3 * n + 1)) for n, name in enumerate(BRANCHES)}
    prompt = new_sequence(blocks=(20,))
    turns = [Turn(rows[name], 5, proposal=branches(name, text)) for name in BRANCHES]
    together = step(engine, *turns, Turn(prompt, 3, run=0))[:-1]
    for name, completion in zip(BRANCHES, together, strict=True):
        (alone,) = step(new_engine(), Turn(new_sequence(), 5, proposal=branches(name, text)))
        assert (completion.tokens, completion.accepted) == (alone.tokens, alone.accepted)


def test_a_tree_may_end_beyond_the_context_as_deep_as_a_chain_may(engine):
    sequence = new_sequence(prompt=[1] * MAX_CONTEXT_TOKENS, blocks=range(8))
    nodes = [(token, parent) for parent in range(-1, 3) for token in (1, 2, 3)]
    parents = [-1, -1, -1, 0, 0, 0, 3, 3, 3, 6, 6, 6]
    proposal = Proposal("d", [token for token, _ in nodes], parents, [1.0] * 12)
    (completion,) = step(engine, Turn(sequence, MAX_CONTEXT_TOKENS, proposal=proposal))
    assert completion.error is None


def test_an_error_ends_its_own_turn_only(engine):
    good, homeless = new_sequence(), new_sequence(name="elsewhere")
    bad_block, bad_token = new_sequence(blocks=(24,)), new_sequence(prompt=(3, VOCAB), blocks=(4,))
    full = new_sequence(prompt=range(BLOCK_TOKENS - 2), blocks=(5,))
    turns = [
        Turn(homeless, 5),
        Turn(bad_block, 5),
        Turn(good, 5),
        Turn(bad_token, 2),
        Turn(full, BLOCK_TOKENS - 2, proposal=Proposal.chain("d", [1, 2, 3])),
    ]
    errors = [completion.error for completion in step(engine, *turns)]
    assert errors[2] is None
    assert "no block table for engine 'target'" in errors[0]
    assert "must lie in 0..23, got [24]" in errors[1]
    assert "must lie in 0..39" in errors[3]
    assert f"needs KV for {BLOCK_TOKENS + 1} tokens, has {BLOCK_TOKENS}" in errors[4]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"end": 4}, "got 4"),
        ({"end": 9, "run": 0}, "got 9"),
        ({"run": 5}, "run must be in 0..4, got 5"),
        ({"run": 2, "proposal": Proposal.chain("d", [1])}, "after a proposal, got 2 and 0"),
        ({"nodes": 3, "proposal": Proposal.chain("d", [1])}, "after a proposal, got 1 and 3"),
        ({"run": 0, "nodes": 3}, "run must be 1 or more where nodes are asked for, got 0"),
        (
            {"proposal": Proposal("d", [1, 2], [-1, 1], [1.0, 1.0])},
            "parent must be an earlier node or -1, got [-1, 1]",
        ),
        ({"proposal": Proposal.chain("d", [1, VOCAB])}, "must lie in 0..39"),
    ],
)
def test_a_turn_that_makes_no_sense_is_an_error_that_says_why(engine, turn, message):
    (completion,) = step(engine, Turn(new_sequence(), **{"end": 5} | turn))
    assert message in completion.error
    assert completion.tokens == []


def test_two_turns_of_one_sequence_are_refused(engine):
    sequence = new_sequence()
    engine.submit([Turn(sequence, 5)])
    with pytest.raises(ValueError, match="at most one turn per sequence"):
        engine.submit([Turn(sequence, 5)])


def test_a_cancelled_sequence_is_forgotten_and_its_turn_never_completes(engine):
    kept, gone = new_sequence(), new_sequence(blocks=(4, 5))
    step(engine, Turn(kept, 5), Turn(gone, 5))
    engine.submit([Turn(kept, 5), Turn(gone, 5)])
    engine.cancel([gone.id, 10**9])
    assert [completion.sequence_id for completion in engine.poll(0.0)] == [kept.id]
    assert (engine.unseen(kept), engine.unseen(gone)) == (0, 5)


def test_another_block_table_starts_again(engine):
    sequence = new_sequence()
    other = new_sequence(blocks=(8, 9))
    expected = plain(engine, other, 4)
    plain(engine, sequence, 2)
    sequence.blocks["target"] = [15, 14, 16]
    assert engine.unseen(sequence) == 7
    assert plain(engine, sequence, 2) == expected[2:]
    assert torch.allclose(kv(engine, sequence, 8), kv(engine, other, 8), atol=1e-12)


def test_a_block_table_that_grows_keeps_its_kv(engine):
    sequence, other = new_sequence(blocks=(3,)), new_sequence(blocks=(8, 9))
    expected = plain(engine, other, BLOCK_TOKENS)
    plain(engine, sequence, BLOCK_TOKENS - 8)
    sequence.blocks["target"] += [6]
    assert engine.unseen(sequence) == 1
    assert plain(engine, sequence, 8) == expected[-8:]
    both = BLOCK_TOKENS + 4
    assert torch.allclose(kv(engine, sequence, both), kv(engine, other, both), atol=1e-12)


def test_what_is_available_is_cut_to_the_limit_the_context_and_the_blocks(engine):
    assert engine.available(new_sequence(), 3) == 3
    assert engine.available(new_sequence(), 9) == 4
    assert engine.available(new_sequence(prompt=range(BLOCK_TOKENS - 1), blocks=(0,)), 4) == 1
    nearly_full = new_sequence(prompt=[1] * (MAX_CONTEXT_TOKENS - 2), blocks=range(8))
    assert engine.available(nearly_full, 4) == 2
    assert engine.available(new_sequence(name="elsewhere"), 4) == 0


def test_assumed_tokens_count_as_seen(engine):
    sequence = new_sequence()
    engine.assume(sequence, 4)
    assert engine.unseen(sequence) == 1
    (completion,) = step(engine, Turn(sequence, 5, proposal=Proposal.chain("bench", [1, 2])))
    assert completion.error is None
