"""The CUDA engine's port with a turn of lookahead, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.cuda.step_columns import StepColumns
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
    for _ in range(2):
        few.submit([turn(texts[1])])
        assert few.can_follow(texts[1])
        poll(few, texts[1])
        assert not few.can_follow(texts[1])  # nothing of it is in flight


def test_a_cancelled_sequence_leaves_its_slot_though_a_turn_of_it_runs() -> None:
    target, gone, next_one = engine(sequences=1), sequence(0), sequence(1)
    target.submit([turn(gone)])
    target.cancel([0])
    target.submit([turn(next_one)])
    assert target.poll(0.0) == []
    poll(target, next_one)
    alone = sequence(2)
    decode(engine(), alone, 1)
    assert next_one.tokens == alone.tokens


def test_nan_ends_the_row_that_has_it() -> None:
    target, broken, whole = engine(), sequence(0), sequence(1)
    decode(target, broken, 1)
    kv = target.model.paged.kv[0]
    kv[broken.blocks["target"][0]] = float("nan")
    target.submit([turn(broken), turn(whole)])
    failed, ran = sorted(target.poll(0.0), key=lambda completion: completion.sequence_id)
    assert failed.error == "the target's logits are not numbers"
    assert ran.error is None


def test_an_error_voids_what_is_in_flight_and_the_text_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, text, alone = engine(), sequence(0), sequence(1)
    decode(engine(), alone, 6)
    decode(target, text, 2)
    target.submit([turn(text)])
    text.blocks["target"] += [8, 9]  # the first submission that brings them to the device fails
    fetch = StepColumns.fetch
    monkeypatch.setattr(StepColumns, "fetch", lambda _: nn.Module()())
    with pytest.raises(NotImplementedError):
        target.submit([Turn(text, AFTER)])
    monkeypatch.setattr(StepColumns, "fetch", fetch)
    target._steps.slots.table.zero_()  # as if nothing of it had run
    assert target.poll(0.0) == []
    decode(target, text, 4)
    assert text.tokens == alone.tokens
    assert target._steps.slots.table[target._slots[0].number, :4].tolist() == [0, 1, 8, 9]


def test_a_head_proposes_at_most_the_longest_path_that_a_step_has_room_for() -> None:
    target, text = engine(max_draft_tokens=40, max_context_tokens=160), sequence(0)
    text.blocks["target"] = [0, 1, 2, 3]
    decode(target, text, 1)
    target._head = lambda draft: "head"  # type: ignore[method-assign]
    turn_of_head = turn(text, device_proposal=DeviceProposal(object(), 40, 40))  # type: ignore[arg-type]
    target._steps.place_states(target._slots[0].number, torch.zeros(0, 0))
    row = target._row(target._job(turn_of_head, []))
    assert (row.places, row.budget) == (15, 40)


def test_heads_propose_the_last_tokens_of_a_text_that_have_no_row() -> None:
    target, text = engine(taps=(1,), text_rows=4), sequence(0)
    target.submit([turn(text)])
    slot = target._slots[0]

    def placed(*new: int) -> set[int]:
        text.tokens += new
        target._place_text_tokens(slot, text)
        target.poll(0.0)
        target.submit([turn(text)])
        return {*target._steps.slots.text_tokens[slot.number].tolist()}

    target._heads["none is static"] = SimpleNamespace(is_static=lambda _: False)  # type: ignore[assignment]
    assert placed() == {8, 9, 10, 11}
    assert placed(20) == {9, 10, 11, 20}
    assert placed(20, 21, 22) == {11, 20, 21, 22}
    assert placed(*range(30, 50)) == {46, 47, 48, 49}
    assert placed(7, 46) == {47, 48, 49, 7}


def test_a_node_without_numbers_is_not_seen_by_the_rest_of_its_row() -> None:
    target, text, alone = engine(), sequence(0), sequence(1)
    decode(target, text, 1)
    decode(target, alone, 2)
    target._lm.get_input_embeddings().weight.data[150] = torch.nan
    tree = Proposal("d", [text.tokens[-1] + 1, 150], [-1, -1], [0.9, 0.8])
    target.submit([turn(text, proposal=tree)])
    poll(target, text)
    assert text.tokens[: len(alone.tokens)] == alone.tokens


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
