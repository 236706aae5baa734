from hypothesis import given, settings
from hypothesis import strategies as st

from backend.kv_ledger import BlockPool, KVLedger
from backend.ports import Sequence
from backend.request import SamplingParams


def sequence(number):
    return Sequence(number, [1], 1, SamplingParams())


def test_a_pool_prefers_the_smallest_contiguous_run_that_fits():
    pool = BlockPool(10)
    a, b, c = pool.allocate(3), pool.allocate(2), pool.allocate(5)
    pool.release(a)
    pool.release(c)
    assert pool.allocate(3) == a
    assert b == [3, 4]


def test_a_fragmented_pool_still_serves_from_several_runs():
    pool = BlockPool(6)
    parts = [pool.allocate(1) for _ in range(6)]
    for part in parts[::2]:
        pool.release(part)
    assert sorted(pool.allocate(3)) == [0, 2, 4]
    assert pool.allocate(1) is None


def test_a_reservation_takes_all_pools_or_none():
    ledger = KVLedger({"target": 4, "draft": 2, "lookup": 0}, headroom_tokens=9)
    first, second = sequence(1), sequence(2)
    assert ledger.reserve(first, 16)
    assert {name: len(blocks) for name, blocks in first.blocks.items()} == {"target": 2, "draft": 2}
    assert not ledger.reserve(second, 1)
    assert second.blocks == {}
    ledger.release(first)
    ledger.release(first)
    assert ledger.usage() == {"target": (0, 4), "draft": (0, 2)}


def test_a_sequence_beyond_the_smallest_pool_never_fits():
    ledger = KVLedger({"target": 4, "draft": 2}, headroom_tokens=0)
    assert ledger.fits_ever(32)
    assert not ledger.fits_ever(33)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
def test_no_block_is_ever_lost_or_owned_twice(actions):
    pool, owned = BlockPool(20), []
    for give, count in actions:
        if give:
            blocks = pool.allocate(count)
            if blocks is None:
                assert pool.free_blocks < count
            else:
                owned.append(blocks)
        elif owned:
            pool.release(owned.pop(count % len(owned)))
        held = [block for blocks in owned for block in blocks]
        assert len(set(held)) == len(held)
        assert pool.free_blocks == 20 - len(held)
