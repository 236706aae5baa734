from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.kv_ledger import GROWTH_BLOCKS, KVLedger
from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from tests.fakes.fake_engine import FakeEngine


def sequence(number, tokens=1):
    return Sequence(number, [1] * tokens, tokens, SamplingParams())


def test_engines_that_keep_kv_share_one_table_in_the_room_of_the_smallest_pool():
    ledger, one = (
        KVLedger({"target": 4, "draft": 3, "lookup": 0}, headroom_tokens=9),
        sequence(1, BLOCK_TOKENS),
    )
    assert ledger.reserve(one, BLOCK_TOKENS)
    assert one.blocks["target"] is one.blocks["draft"]
    assert set(one.blocks) == {"target", "draft"}
    assert ledger.usage() == {"used": 2, "free": 1, "cached": 0}
    ledger.release(one)
    ledger.release(one)
    assert one.blocks == {}
    assert ledger.usage() == {"used": 0, "free": 3, "cached": 0}


def test_without_an_engine_that_keeps_kv_everything_fits():
    ledger, one = KVLedger({"target": 0}, headroom_tokens=9), sequence(1, 1000)
    assert ledger.fits_ever(10**6)
    assert ledger.reserve(one, 10**6)
    assert ledger.grow(one)
    assert one.blocks == {}


def test_a_sequence_beyond_the_pool_never_fits():
    ledger = KVLedger({"target": 2}, headroom_tokens=0)
    assert ledger.fits_ever(2 * BLOCK_TOKENS)
    assert not ledger.fits_ever(2 * BLOCK_TOKENS + 1)


def test_a_sequence_is_given_what_it_needs_now_and_then_grows_at_the_end_of_its_table():
    ledger = KVLedger({"target": 64}, headroom_tokens=9)
    one = sequence(1, 3 * BLOCK_TOKENS - 9)
    assert ledger.reserve(one, 500)
    before = list(one.blocks["target"])
    assert len(before) == 3
    assert ledger.grow(one)
    assert one.blocks["target"] == before
    one.tokens += [1] * 9
    assert ledger.grow(one)
    assert one.blocks["target"][:3] == before
    assert len(one.blocks["target"]) == 4


def test_a_table_does_not_grow_without_room_and_does_when_another_ends():
    ledger = KVLedger({"target": 4}, 0, growth_blocks=0)
    old, new = sequence(1, BLOCK_TOKENS), sequence(2, BLOCK_TOKENS)
    assert ledger.reserve(old, 4 * BLOCK_TOKENS)
    assert ledger.reserve(new, 4 * BLOCK_TOKENS)
    old.tokens += [1] * 2 * BLOCK_TOKENS
    assert ledger.grow(old)
    new.tokens += [1]
    assert not ledger.grow(new)
    assert len(new.blocks["target"]) == 1
    ledger.release(old)
    assert ledger.grow(new)


def test_a_newcomer_waits_until_all_others_can_grow():
    ledger, old, new = (
        KVLedger({"target": 4 + GROWTH_BLOCKS}, headroom_tokens=0),
        sequence(1, 3 * BLOCK_TOKENS),
        sequence(2, BLOCK_TOKENS),
    )
    assert ledger.reserve(old, 6 * BLOCK_TOKENS)
    assert ledger.reserve(new, BLOCK_TOKENS)
    ledger.release(new)
    old.tokens.append(1)
    assert ledger.grow(old)
    assert not ledger.reserve(new, BLOCK_TOKENS)


def test_a_guaranteed_ledger_reserves_whole_lives():
    ledger = KVLedger({"target": 10}, headroom_tokens=0, guaranteed=True)
    assert ledger.reserve(sequence(1, BLOCK_TOKENS), 5 * BLOCK_TOKENS)
    assert ledger.usage() == {"used": 5, "free": 5, "cached": 0}
    assert not ledger.reserve(sequence(2, 1), 6 * BLOCK_TOKENS)
    assert ledger.reserve(sequence(3, 1), 5 * BLOCK_TOKENS)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "grow", "release"]),
        st.integers(0, 9),
        st.integers(1, 4 * BLOCK_TOKENS),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(
    size=st.integers(1, 40),
    guaranteed=st.booleans(),
    growth_blocks=st.integers(0, 2),
    actions=ACTIONS,
)
def test_no_block_is_ever_lost_or_owned_twice_and_every_table_holds_what_is_needed(
    size, guaranteed, growth_blocks, actions
):
    ledger, live = (
        KVLedger(
            {"target": size, "draft": size}, 5, guaranteed=guaranteed, growth_blocks=growth_blocks
        ),
        {},
    )
    for action, number, tokens in actions:
        one = live.get(number)
        if action == "reserve" and one is None:
            one = sequence(number, tokens)
            if ledger.fits_ever(2 * tokens) and ledger.reserve(one, 2 * tokens):
                live[number] = one
        elif action == "grow" and one is not None and len(one.tokens) < 2 * one.prompt_tokens:
            one.tokens.append(1)
            if not ledger.grow(one):
                assert ledger.usage()["free"] == 0
                assert not guaranteed
                one.tokens.pop()
        elif action == "release" and one is not None:
            ledger.release(live.pop(number))
        tables = [each.blocks["target"] for each in live.values()]
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(size))
        assert all(
            len(table) * BLOCK_TOKENS >= len(each.tokens) + 5
            for table, each in zip(tables, live.values(), strict=True)
        )
        assert ledger.usage() == {"used": len(owned), "free": size - len(owned), "cached": 0}


def serve(ledger, target, one):
    """Admit a sequence, run its prompt and let it end; return how many blocks it found."""
    assert ledger.reserve(one, len(one.tokens))
    target.submit([Turn(one, len(one.tokens))])
    assert target.poll(0.0)[0].error is None
    ledger.release(one)
    target.cancel([one.id])
    return ledger.take_reuse().reused


def reusing(size=64, **options):
    target = FakeEngine("target", kv_blocks=size)
    return KVLedger({"target": size, "draft": size}, 5, target=target, **options), target


def test_a_text_finds_the_complete_blocks_of_an_earlier_one_but_never_that_of_its_last_token():
    ledger, target = reusing()
    assert [serve(ledger, target, sequence(n, 3 * BLOCK_TOKENS)) for n in (1, 2)] == [0, 2]
    assert serve(ledger, target, sequence(3, 3 * BLOCK_TOKENS + 1)) == 3
    assert serve(ledger, target, sequence(4, BLOCK_TOKENS)) == 0
    assert ledger.usage() == {"used": 0, "free": 64, "cached": 3}


def test_shared_blocks_are_counted_once_and_reuse_is_reported():
    ledger, _ = reusing()
    one, other = (sequence(n, 2 * BLOCK_TOKENS + 8) for n in (1, 2))
    assert ledger.reserve(one, len(one.tokens))
    assert ledger.reserve(other, len(other.tokens))
    assert one.blocks["target"][:2] == other.blocks["target"][:2]
    assert one.blocks["target"][2] != other.blocks["target"][2]
    assert ledger.usage()["used"] == 4
    reuse = ledger.take_reuse()
    assert (reuse.reused, reuse.missed, reuse.tokens) == (
        2,
        2,
        0,
    )  # the target has not run the prompt yet
    assert ledger.take_reuse().reused == 0


def test_a_sequence_finds_what_it_had_before_it_was_pre_empted():
    ledger, target = reusing()
    one = sequence(1, 2 * BLOCK_TOKENS + 8)
    serve(ledger, target, one)
    one.tokens += [7] * 10
    assert ledger.reserve(one, len(one.tokens) + 10)
    assert ledger.take_reuse().tokens == 2 * BLOCK_TOKENS
    assert target.unseen(one) == 18


def test_what_the_target_never_ran_is_not_kept():
    ledger, target = reusing()
    one = sequence(1, 3 * BLOCK_TOKENS)
    assert ledger.reserve(one, 3 * BLOCK_TOKENS)
    target.submit([Turn(one, BLOCK_TOKENS + 4, run=0)])
    target.poll(0.0)
    ledger.release(one)
    assert ledger.usage()["cached"] == 1


def test_cached_blocks_are_room_for_others_and_admission_does_not_count_a_shared_one_twice():
    ledger, target = reusing(5, growth_blocks=0)
    serve(ledger, target, sequence(1, 3 * BLOCK_TOKENS))
    five, four = (count * BLOCK_TOKENS for count in (5, 4))
    of_another = Sequence(2, [2] * five, five, SamplingParams())
    assert not ledger.reserve(of_another, five)  # six blocks of five
    again = sequence(3, four)
    assert ledger.reserve(again, four)  # three that are there and two more
    ledger.release(again)
    assert ledger.reserve(Sequence(4, [2] * four, four, SamplingParams()), four)
    assert ledger.take_reuse().evicted == 3


def test_tenants_with_different_salts_share_nothing():
    ledger, target = reusing()
    salted = [
        replace(sequence(n, 3 * BLOCK_TOKENS), salt=salt)
        for n, salt in enumerate(["", "a", "", "a", "b"])
    ]
    assert [serve(ledger, target, one) for one in salted] == [0, 0, 2, 2, 0]


def test_a_guaranteed_life_counts_its_shared_beginning():
    ledger, target = reusing(8, guaranteed=True)
    serve(ledger, target, sequence(1, 3 * BLOCK_TOKENS))
    assert ledger.reserve(sequence(2, 3 * BLOCK_TOKENS + 1), 7 * BLOCK_TOKENS - 10)
    assert ledger.usage() == {"used": 7, "free": 1, "cached": 0}


def test_another_draft_takes_part_in_the_tables_that_are_there_and_one_that_goes_leaves_them():
    ledger = KVLedger({"target": 8, "old": 8}, headroom_tokens=0)
    one = sequence(1, 3 * BLOCK_TOKENS)
    assert ledger.reserve(one, 6 * BLOCK_TOKENS)
    table = one.blocks["target"]
    ledger.change_engines({"target": 8, "new": 8, "lookup": 0}, [one])
    assert set(one.blocks) == {"target", "new"}
    assert one.blocks["new"] is one.blocks["target"] is table
    with pytest.raises(ValueError, match=r"share 8 KV blocks, got \{'small': 7\}"):
        ledger.change_engines({"target": 8, "small": 7}, [one])
    assert set(one.blocks) == {"target", "new"}
    two = sequence(2, BLOCK_TOKENS)
    assert ledger.reserve(two, BLOCK_TOKENS)
    assert two.blocks["new"] is two.blocks["target"]
