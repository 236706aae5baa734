import pytest

from backend.core.block_pool import BlockPool, block_key, root_key
from backend.sequence import BLOCK_TOKENS

KEYS = [block_key(root_key(""), [n] * BLOCK_TOKENS) for n in range(8)]


def published(pool, keys):
    """A table of blocks that hold the content of ``keys``."""
    table = pool.allocate(len(keys))
    for key, block in zip(keys, table, strict=True):
        pool.publish(key, block)
    return table


def test_a_key_depends_on_the_tokens_on_those_before_and_on_the_salt():
    keys = [root_key(""), root_key("a")]
    keys += [block_key(root, [1, 2]) for root in keys]
    keys += [block_key(keys[2], [1, 2]), block_key(keys[2], [2, 1])]
    assert len(set(keys)) == len(keys)
    assert block_key(root_key("a"), [1, 2]) == keys[3]


def test_blocks_are_found_up_to_the_first_that_is_not_there():
    pool = BlockPool(8)
    table = published(pool, KEYS[:2])
    pool.publish(KEYS[3], pool.allocate(1)[0])
    assert pool.find(KEYS[:4]) == table
    assert pool.find(KEYS[2:]) == []


def test_what_is_dropped_stays_to_be_found_as_far_as_it_is_valid_and_was_published():
    pool = BlockPool(8)
    table = published(pool, KEYS[:3]) + pool.allocate(1)
    pool.drop(table, valid=2)
    assert pool.find(KEYS) == table[:2]
    assert (pool.available, pool.cached) == (8, 2)


def test_the_least_recently_used_text_gives_way_first_and_from_its_end():
    pool = BlockPool(4)
    first, second = published(pool, KEYS[:2]), published(pool, KEYS[4:6])
    pool.drop(first, 2)
    pool.drop(second, 2)
    pool.share(pool.find(KEYS[:2]))
    pool.drop(first, 2)  # used again
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order == [second[1], second[0], first[1], first[0]]
    assert pool.evicted == 4
    assert pool.find(KEYS[:1]) == pool.find(KEYS[4:5]) == []


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    kept = published(pool, KEYS[:2])
    pool.drop(kept, 2)
    assert not set(pool.allocate(2)) & set(kept)
    assert pool.evicted == 0


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_a_block_is_free_when_its_last_reference_goes(first_to_go):
    pool = BlockPool(2)
    table = published(pool, KEYS[:1])
    pool.share(table)
    valid = [0, 1]
    pool.drop(table, valid[first_to_go])
    assert (pool.available, pool.find(KEYS[:1])) == (1, table)
    pool.drop(table, valid[1 - first_to_go])
    assert (pool.available, pool.cached) == (2, int(first_to_go == 0))


def test_the_first_block_of_a_content_is_the_one_that_is_found():
    pool = BlockPool(4)
    one, other = published(pool, KEYS[:1]), published(pool, KEYS[:1])
    assert pool.find(KEYS[:1]) == one
    pool.drop(other, 1)
    assert pool.find(KEYS[:1]) == one
    assert pool.cached == 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda pool, table: pool.share(table[:1]),
            "KV block 5 has 2 references and is in 1 tables",
        ),
        (lambda pool, table: table.pop(), "KV block 7 has 1 references and is in 0 tables"),
        (lambda pool, table: pool.allocate(1), "KV block 4 has 1 references and is in 0 tables"),
    ],
)
def test_blocks_that_are_counted_wrong_are_reported_with_their_numbers(spoil, words):
    pool = BlockPool(8)
    table = published(pool, KEYS[:3])
    pool.check([table])
    spoil(pool, table)
    with pytest.raises(RuntimeError, match=words):
        pool.check([table])
