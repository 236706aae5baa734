"""Places of a sequence's KV, and the rotary embedding as tables."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from backend.engines.models.rope import rope_tables
from backend.engines.stepping.chunks import KVTable
from backend.engines.torch import decoder
from backend.sequence import BLOCK_TOKENS
from tests.fakes.checkpoints import LLAMA3
from tests.fakes.llamas import llama


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_tables_are_those_of_transformers(rope):
    config = llama(10, 32, 8, 1, 4, 1, 8, rope=rope, rope_theta=5e3)
    cos, sin = rope_tables(config, 100)
    shape = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=100)
    shape.rope_parameters = {**rope, "rope_theta": 5e3}
    wanted = LlamaRotaryEmbedding(shape)(torch.zeros(1), torch.arange(100)[None])
    signs = torch.tensor([-1.0] * 4 + [1.0] * 4)  # of halves that are swapped
    torch.testing.assert_close(torch.from_numpy(cos), wanted[0][0])
    torch.testing.assert_close(torch.from_numpy(sin), wanted[1][0] * signs)
    cos, sin = rope_tables(config, 100, torch)
    if rope["rope_type"] != "llama3":  # its terms are added in another order
        assert torch.equal(cos, wanted[0][0])
        assert torch.equal(sin, wanted[1][0] * signs)


def test_a_table_finds_and_reads_positions_in_its_blocks():
    slots = 8 * BLOCK_TOKENS
    table, pool = KVTable([4, 6]), torch.arange(slots * 2).view(slots, 2)
    first, last, next_one = 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1, 6 * BLOCK_TOKENS
    assert table.slots[[0, BLOCK_TOKENS - 1, BLOCK_TOKENS]].tolist() == [first, last, next_one]
    assert len(table) == 2 * BLOCK_TOKENS
    for positions in (1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS):
        read = decoder.read_positions(pool, table, positions)
        assert torch.equal(read, pool[table.slots[:positions]])
