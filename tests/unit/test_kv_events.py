"""KV events as readers of vLLM's decode them, and which blocks are published."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from backend.core.kv_ledger import KVLedger
from backend.ops.kv_events import KVEvents
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from tests.fakes.fake_engine import FakeEngine


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """As vLLM declares it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """As vLLM declares it."""

    block_hashes: list[int]
    medium: str | None = None


class Batch(msgspec.Struct, array_like=True):
    """As vLLM declares it."""

    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


@pytest.fixture
def published(tmp_path):
    """Return a publisher, and a function that returns the events since its last call."""
    endpoint = f"ipc://{tmp_path}/events"
    events, context = KVEvents(endpoint), zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(endpoint)
    numbers = []

    def receive(limit_ms):
        made = []
        while reader.poll(limit_ms):
            topic, number, batch = reader.recv_multipart()
            assert topic == b""
            numbers.append(int.from_bytes(number, "big"))
            made += msgspec.msgpack.decode(batch, type=Batch).events
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True
        return made

    while not receive(20):  # until the subscription has arrived
        events.add_block(b"first first first", None, [1])
    yield events, lambda: receive(300)
    reader.close()
    context.term()
    events.close()


def sequence(number, tokens, prompt_tokens=None, salt=""):
    return Sequence(number, tokens, prompt_tokens or len(tokens), SamplingParams(), salt=salt)


def test_blocks_of_prompts_are_published_and_removed_but_none_with_a_salt(published):
    events, received = published
    target = FakeEngine("target", kv_blocks=4, max_draft_tokens=8)
    ledger = KVLedger({"target": 4}, 0, growth_blocks=0, target=target)
    ledger.observe(events)
    tokens = [*range(2 * BLOCK_TOKENS)]
    one = sequence(1, tokens)
    assert ledger.reserve(one, len(tokens))
    assert ledger.reserve(sequence(2, tokens, salt="tenant"), len(tokens))
    first, second = received()
    assert first == BlockStored(first.block_hashes, None, tokens[:BLOCK_TOKENS], 32, None, "GPU")
    assert (second.parent_block_hash, second.token_ids) == (
        first.block_hashes[0],
        tokens[BLOCK_TOKENS:],
    )
    ledger.release(one)  # the target has run nothing of it
    assert received() == [
        BlockRemoved(second.block_hashes, "GPU"),
        BlockRemoved(first.block_hashes, "GPU"),
    ]


def test_an_endpoint_that_cannot_be_bound_is_named():
    with pytest.raises(ValueError, match=r"KV_EVENTS .* cannot be bound"):
        KVEvents("tcp://192.0.2.1:1")
