"""The CUDA engine's port with a turn of lookahead, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.port import AFTER, Completion, DeviceProposal, Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from tests.cuda.families import models

pytestmark = pytest.mark.slow
PROMPT = [7, 8, 9, 10, 11]


def engine(**options: Any) -> LookaheadEngine:
    lm = models("llama")[1].lm
    sizes: dict[str, Any] = {"kv_blocks": 16, "max_context_tokens": 60, "max_draft_tokens": 4}
    return LookaheadEngine("target", lm, vocab_size=199, **(sizes | {"sequences": 3} | options))


def sequence(number: int, **options: Any) -> Sequence:
    blocks = {"target": [2 * number, 2 * number + 1]}
    return Sequence(number, list(PROMPT), len(PROMPT), SamplingParams(**options), blocks)


def turn(text: Sequence, **options: Any) -> Turn:
    return Turn(text, len(text.tokens), 1, **options)


def poll(target: LookaheadEngine, *texts: Sequence) -> list[Completion]:
    """Complete a submission, and commit what it emitted."""
    done = {completion.sequence_id: completion for completion in target.poll(0.0)}
    for text in texts:
        assert done[text.id].error is None
        text.tokens += done[text.id].tokens
    return [done[text.id] for text in texts]


def decode(target: LookaheadEngine, text: Sequence, steps: int) -> None:
    for _ in range(steps):
        target.submit([turn(text)])
        poll(target, text)


def test_a_turn_follows_one_in_flight_and_its_text_is_the_same() -> None:
    target, one, other = engine(), sequence(0), sequence(1, temperature=0.9, seed=3)
    decode(target, one, 8)
    decode(target, other, 8)
    again, ahead = sequence(2), sequence(3, temperature=0.9, seed=3)
    target.cancel([0])
    assert not target.can_follow(again)
    target.submit([turn(again), turn(ahead)])
    for _ in range(7):
        assert target.can_follow(again)
        target.submit([Turn(text, AFTER) for text in (again, ahead)])
        poll(target, again, ahead)
        assert target.parts_s()["verify"] > 0.0
    poll(target, again, ahead)
    assert again.tokens == one.tokens
    assert ahead.tokens == other.tokens
    assert target.unseen(again) == 1


def test_a_turn_that_follows_none_fails_alone() -> None:
    target, one, other = engine(), sequence(0), sequence(1)
    decode(target, one, 1)
    target.submit([Turn(one, AFTER), turn(other)])
    failed, ran = sorted(target.poll(0.0), key=lambda completion: completion.sequence_id)
    assert failed.error == "turn of sequence 0: there is none that it may follow"
    assert ran.error is None


def test_more_sequences_than_slots_take_the_hosts_path() -> None:
    few, many = engine(sequences=1), engine(sequences=4)
    texts, others = ([sequence(n) for n in range(4)] for _ in range(2))
    for _ in range(4):
        for target, own in ((few, texts), (many, others)):
            target.submit([turn(text) for text in own])
            poll(target, *own)
    assert [text.tokens for text in texts] == [text.tokens for text in others]
    few.cancel([0])
    assert not few.can_follow(texts[1])
    decode(few, texts[1], 1)
    assert few.can_follow(texts[1])


def test_a_cancelled_sequence_leaves_its_slot_though_a_turn_of_it_runs() -> None:
    target, gone, next_one = engine(sequences=1), sequence(0), sequence(1)
    target.submit([turn(gone)])
    target.submit([Turn(gone, AFTER)])
    target.cancel([0])
    target.submit([turn(next_one)])
    assert target.poll(0.0) == []
    assert target.poll(0.0) == []
    poll(target, next_one)
    alone = sequence(2)
    decode(engine(), alone, 1)
    assert next_one.tokens == alone.tokens


def test_nan_ends_the_row_that_has_it() -> None:
    target, broken, whole = engine(), sequence(0), sequence(1)
    decode(target, broken, 1)
    kv = target._paged.kv[0]
    kv[broken.blocks["target"][0]] = float("nan")
    target.submit([turn(broken), turn(whole)])
    failed, ran = sorted(target.poll(0.0), key=lambda completion: completion.sequence_id)
    assert failed.error == "the target's logits are no numbers"
    assert ran.error is None


def test_an_error_voids_what_is_in_flight_and_the_text_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, text, alone = engine(), sequence(0), sequence(1)
    decode(engine(), alone, 6)
    decode(target, text, 2)
    target.submit([turn(text)])
    run = target._steps.launch
    monkeypatch.setattr(target._steps, "launch", lambda _: nn.Module()())
    with pytest.raises(NotImplementedError):
        target.submit([Turn(text, AFTER)])
    monkeypatch.setattr(target._steps, "launch", run)
    assert target.poll(0.0) == []
    decode(target, text, 4)
    assert text.tokens == alone.tokens


def test_a_head_proposes_at_most_the_longest_path_that_a_step_has_room_for() -> None:
    target, text = engine(max_draft_tokens=40, max_context_tokens=160), sequence(0)
    text.blocks["target"] = [0, 1, 2, 3]
    decode(target, text, 1)
    target._head = lambda draft: "head"  # type: ignore[method-assign]
    turn_of_head = turn(text, device_proposal=DeviceProposal(object(), 40, 40))  # type: ignore[arg-type]
    target._steps.place_states(target._slots[0].number, torch.zeros(0, 0))
    row = target._row(target._job(turn_of_head, []))
    assert (row.places, row.budget) == (15, 40)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"proposal": Proposal.chain("d", [3, 500])}, "token ids of sequence 0 must lie in 0..198"),
        ({"device_proposal": DeviceProposal(object(), 2, 2)}, "cannot run the draft"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_turn_fails_alone(wrong: dict[str, Any], error: str) -> None:
    target, one, other = engine(), sequence(0), sequence(1)
    decode(target, one, 1)
    target.submit([turn(one, **wrong), turn(other)])
    failed, ran = sorted(target.poll(0.0), key=lambda completion: completion.sequence_id)
    assert error in (failed.error or "")
    assert ran.error is None


def test_blocks_that_do_not_cover_a_turn_are_an_error() -> None:
    target, text = engine(), sequence(0)
    text.blocks["target"] = [0]
    text.tokens = [5] * (BLOCK_TOKENS + 1)
    target.submit([turn(text)])
    (failed,) = target.poll(0.0)
    assert "needs KV for 33 tokens, has 32" in (failed.error or "")


def test_close_releases_the_model() -> None:
    target = engine()
    decode(target, sequence(0), 1)
    target.close()
    assert not hasattr(target, "_model")
