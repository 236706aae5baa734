from hypothesis import given, settings
from hypothesis import strategies as st

from backend.kv_ledger import GROWTH_BLOCKS, KVLedger
from backend.ports import BLOCK_TOKENS, Sequence
from backend.request import SamplingParams


def sequence(number, tokens=1):
    return Sequence(number, [1] * tokens, tokens, SamplingParams())


def test_engines_that_keep_kv_share_one_table_in_the_room_of_the_smallest_pool():
    ledger, one = KVLedger({"target": 4, "draft": 3, "lookup": 0}, headroom_tokens=9), sequence(1, 16)
    assert ledger.reserve(one, 16)
    assert one.blocks["target"] is one.blocks["draft"]
    assert set(one.blocks) == {"target", "draft"}
    assert ledger.usage() == {"used": 2, "free": 1}
    ledger.release(one)
    ledger.release(one)
    assert one.blocks == {}
    assert ledger.usage() == {"used": 0, "free": 3}


def test_without_an_engine_that_keeps_kv_everything_fits():
    ledger, one = KVLedger({"target": 0}, headroom_tokens=9), sequence(1, 1000)
    assert ledger.fits_ever(10**6)
    assert ledger.reserve(one, 10**6)
    assert ledger.grow(one)
    assert one.blocks == {}


def test_a_sequence_beyond_the_pool_never_fits():
    ledger = KVLedger({"target": 2}, headroom_tokens=0)
    assert ledger.fits_ever(32)
    assert not ledger.fits_ever(33)


def test_a_sequence_is_given_what_it_needs_now_and_then_grows_at_the_end_of_its_table():
    ledger, one = KVLedger({"target": 64}, headroom_tokens=9), sequence(1, 39)
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
    ledger, old, new = KVLedger({"target": 4}, 0, growth_blocks=0), sequence(1, 16), sequence(2, 16)
    assert ledger.reserve(old, 64)
    assert ledger.reserve(new, 64)
    old.tokens += [1] * 32
    assert ledger.grow(old)
    new.tokens += [1]
    assert not ledger.grow(new)
    assert len(new.blocks["target"]) == 1
    ledger.release(old)
    assert ledger.grow(new)


def test_a_newcomer_waits_until_all_others_can_grow():
    ledger, old, new = KVLedger({"target": 4 + GROWTH_BLOCKS}, headroom_tokens=0), sequence(1, 48), sequence(2, 16)
    assert ledger.reserve(old, 96)
    assert ledger.reserve(new, 16)
    ledger.release(new)
    old.tokens.append(1)
    assert ledger.grow(old)
    assert not ledger.reserve(new, 16)


def test_a_guaranteed_ledger_reserves_whole_lives():
    ledger, one = KVLedger({"target": 10}, headroom_tokens=0, guaranteed=True), sequence(1, 16)
    assert ledger.reserve(one, 80)
    assert ledger.usage() == {"used": 5, "free": 5}
    assert not ledger.reserve(sequence(2, 1), 96)
    assert ledger.reserve(sequence(3, 1), 80)


ACTIONS = st.lists(st.tuples(st.sampled_from(["reserve", "grow", "release"]), st.integers(0, 9), st.integers(1, 60)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 40), guaranteed=st.booleans(), growth_blocks=st.integers(0, 2), actions=ACTIONS)
def test_no_block_is_ever_lost_or_owned_twice_and_every_table_holds_what_is_needed(size, guaranteed, growth_blocks, actions):
    ledger, held = KVLedger({"target": size, "draft": size}, 5, guaranteed=guaranteed, growth_blocks=growth_blocks), {}
    for action, number, tokens in actions:
        one = held.get(number)
        if action == "reserve" and one is None:
            one = sequence(number, tokens)
            if ledger.fits_ever(2 * tokens) and ledger.reserve(one, 2 * tokens):
                held[number] = one
        elif action == "grow" and one is not None and len(one.tokens) < 2 * one.prompt_tokens:
            one.tokens.append(1)
            if not ledger.grow(one):
                assert ledger.usage()["free"] == 0
                assert not guaranteed
                one.tokens.pop()
        elif action == "release" and one is not None:
            ledger.release(held.pop(number))
        tables = [each.blocks["target"] for each in held.values()]
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(size))
        assert all(len(table) * BLOCK_TOKENS >= len(each.tokens) + 5 for table, each in zip(tables, held.values(), strict=True))
        assert ledger.usage() == {"used": len(owned), "free": size - len(owned)}
