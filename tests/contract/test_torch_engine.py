"""The port's promises, kept by TorchEngine as target and as draft (a tiny random model in fp64)."""

import itertools

import pytest
import torch

from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams
from tests.contract.deployment import tiny_config, tiny_engine

VOCAB, KV_BLOCKS = 40, 24


def new_engine(name="target", shortlist=0):
    return tiny_engine(name, config=tiny_config(VOCAB, shortlist=shortlist), kv_blocks=KV_BLOCKS)


@pytest.fixture
def engine():
    return new_engine()


numbers = itertools.count(1)


def new_sequence(*, prompt=(3, 1, 4, 1, 5), blocks=(0, 1, 2), sampling=None, name="target"):
    return Sequence(next(numbers), list(prompt), len(prompt), sampling or SamplingParams(), {name: list(blocks)})


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
    slots = [sequence.blocks[engine.name][p // 16] * 16 + p % 16 for p in range(count)]
    return torch.stack([layer.pool[slots] for layer in engine._model._layers])


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
        proposal = Proposal("oracle", expected[done : done + k])
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
    (completion,) = step(engine, Turn(sequence, 5, proposal=Proposal("d", tokens)))
    assert completion.tokens == expected[: right + 1]
    sequence.tokens += completion.tokens
    assert engine.unseen(sequence) == 1
    plain(engine, sequence, 2)
    fresh = new_sequence(prompt=sequence.tokens, blocks=(12, 13))
    step(engine, Turn(fresh, len(fresh.tokens), run=0))
    seen = len(sequence.tokens) - engine.unseen(sequence)
    assert torch.allclose(kv(engine, sequence, seen), kv(engine, fresh, seen), atol=1e-12)


def test_a_free_run_equals_as_many_single_steps_and_its_own_accepted_tokens_need_no_catch_up(engine):
    expected = plain(engine, new_sequence(), 6)
    sequence = new_sequence(blocks=(3, 4, 5))
    (completion,) = step(engine, Turn(sequence, 5, run=4, keep_probs=True))
    assert completion.tokens == expected[:4]
    assert completion.probs is None  # greedy: a point mass
    sequence.tokens += [*completion.tokens[:2], (completion.tokens[2] + 1) % VOCAB]
    assert engine.unseen(sequence) == 1
    full = new_sequence(blocks=(6, 7, 8))
    step(engine, Turn(full, 5, run=4))
    full.tokens += expected[:5]  # all four and the target's bonus token
    assert engine.unseen(full) == 2
    assert plain(engine, full, 1) == expected[5:]


def test_free_runs_of_different_lengths_share_their_passes(engine):
    expected = plain(engine, new_sequence(), 4)
    turns = [Turn(new_sequence(blocks=(3 * i + 3, 3 * i + 4)), 5, run=run) for i, run in enumerate((1, 4, 2, 0))]
    assert [completion.tokens for completion in step(engine, *turns)] == [expected[:1], expected[:4], expected[:2], []]


def test_a_sampled_free_run_keeps_the_law_that_it_drew_from():
    sampling = SamplingParams(temperature=0.9, top_k=5, seed=4)
    for name, shortlist in (("full", 0), ("short", 7)):
        engine = new_engine(name, shortlist)
        (completion,) = step(engine, Turn(new_sequence(sampling=sampling, name=name), 5, run=3, keep_probs=True))
        law = completion.probs
        assert law.probs.shape == (3, shortlist or VOCAB)
        assert ((law.probs > 0).sum(-1) == 5).all()
        assert (law.of(completion.tokens) > 0).all()
        allowed = set(range(VOCAB)) if law.token_ids is None else set(law.token_ids.tolist())
        assert set(completion.tokens) <= allowed
        (again,) = step(engine, Turn(new_sequence(sampling=sampling, name=name, blocks=(7, 8)), 5, run=3, keep_probs=True))
        assert again.tokens == completion.tokens  # randomness is keyed, not drawn from a state


def test_sampled_attempts_draw_anew(engine):
    sequence = new_sequence(sampling=SamplingParams(temperature=5.0))
    drawn = set()
    for attempt in range(12):
        sequence.attempt = attempt
        drawn.add(step(engine, Turn(sequence, 5))[0].tokens[0])
    assert len(drawn) > 3


def test_an_error_ends_its_own_turn_only(engine):
    good, homeless = new_sequence(), new_sequence(name="elsewhere")
    bad_block, bad_token = new_sequence(blocks=(24,)), new_sequence(prompt=(3, VOCAB), blocks=(4,))
    full = new_sequence(prompt=range(14), blocks=(5,))
    turns = [
        Turn(homeless, 5),
        Turn(bad_block, 5),
        Turn(good, 5),
        Turn(bad_token, 2),
        Turn(full, 14, proposal=Proposal("d", [1, 2, 3])),
    ]
    errors = [completion.error for completion in step(engine, *turns)]
    assert errors[2] is None
    assert "no block table for engine 'target'" in errors[0]
    assert "must lie in 0..23, got [24]" in errors[1]
    assert "must lie in 0..39" in errors[3]
    assert "needs KV for 17 tokens, has 16" in errors[4]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"end": 4}, "got 4"),
        ({"end": 9, "run": 0}, "got 9"),
        ({"run": 5}, "run must be in 0..4, got 5"),
        ({"run": 2, "proposal": Proposal("d", [1])}, "behind a proposal, got 2"),
        ({"proposal": Proposal("d", [1, VOCAB])}, "must lie in 0..39"),
    ],
)
def test_a_turn_that_makes_no_sense_is_an_error_that_says_why(engine, turn, message):
    (completion,) = step(engine, Turn(new_sequence(), **{"end": 5} | turn))
    assert message in completion.error
    assert completion.tokens == []


def test_a_proposal_that_its_law_cannot_have_given_is_an_error(engine):
    sequence = new_sequence(sampling=SamplingParams(temperature=1.0))
    (drafted,) = step(engine, Turn(sequence, 5, run=2, keep_probs=True))
    with torch.inference_mode():
        drafted.probs.probs[1, drafted.tokens[1]] = 0.0
    (completion,) = step(engine, Turn(sequence, 5, proposal=Proposal("d", drafted.tokens, drafted.probs)))
    assert "probability 0" in completion.error


def test_a_shortlisted_draft_cannot_verify():
    engine = new_engine("short", 7)
    (completion,) = step(engine, Turn(new_sequence(name="short"), 5, proposal=Proposal("d", [1])))
    assert "shortlisted" in completion.error


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


def test_another_block_table_starts_anew(engine):
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
    expected = plain(engine, other, 16)
    plain(engine, sequence, 8)
    sequence.blocks["target"] += [6]
    assert engine.unseen(sequence) == 1
    assert plain(engine, sequence, 8) == expected[8:]
    assert torch.allclose(kv(engine, sequence, 20), kv(engine, other, 20), atol=1e-12)


def test_what_is_available_is_cut_to_the_limit_the_context_and_the_blocks(engine):
    assert engine.available(new_sequence(), 3) == 3
    assert engine.available(new_sequence(), 9) == 4
    assert engine.available(new_sequence(prompt=range(15), blocks=(0,)), 4) == 1
    assert engine.available(new_sequence(prompt=[1] * 94, blocks=range(8)), 4) == 2
    assert engine.available(new_sequence(name="elsewhere"), 4) == 0


def test_assumed_tokens_count_as_seen(engine):
    sequence = new_sequence()
    engine.assume(sequence, 4)
    assert engine.unseen(sequence) == 1
    (completion,) = step(engine, Turn(sequence, 5, proposal=Proposal("bench", [1, 2])))
    assert completion.error is None
