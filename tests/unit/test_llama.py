"""The lean forward against transformers' on the same random weights."""

import pytest
import torch

from backend.engines.checkpoint import LlamaConfig, load
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.stepping.rope import rope_tables
from backend.engines.torch.llama import Llama
from backend.sequence import BLOCK_TOKENS

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama untied": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": False},
    ),
    "llama3 rope, tied": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"rope_theta": 5000.0}},
    ),
    "linear rope, one kv head": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama with biases": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True},
    ),
    "wide heads": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"head_dim": 16, "num_key_value_heads": 4},
    ),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": None},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": False},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers' model in fp64, folder)"""
    config, model, extra = FAMILIES[request.param]
    torch.manual_seed(0)
    theirs = model(config(**SHAPE | extra)).double().eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs, folder


def lean(folder, dtype="fp64"):
    return Llama(*load(folder, dtype), kv_blocks=32, max_positions=256)


def run(model, *chunks):
    with torch.inference_mode():
        return model.forward(chunks)


def reference(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def text(count, seed=1):
    return torch.randint(
        0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def test_a_prefill_equals_transformers(pair):
    theirs, folder = pair
    tokens = text(100)
    logits = run(lean(folder), Chunk(tokens, 0, KVTable([3, 4, 5, 6], "cpu"), 100))
    assert torch.allclose(
        logits, reference(theirs, tokens), atol=1e-4
    )  # transformers' rope and norm are fp32 inside
    single = run(lean(folder, "fp32"), Chunk(tokens, 0, KVTable([3, 4, 5, 6], "cpu"), 100))
    assert torch.allclose(single.double(), reference(theirs, tokens), atol=2e-3)


def test_chunks_single_tokens_and_scattered_blocks_equal_one_prefill(pair):
    _, folder = pair
    tokens = text(100)
    whole = run(lean(folder), Chunk(tokens, 0, KVTable([3, 4, 5, 6], "cpu"), 100))
    for blocks in ([0, 1, 2, 3], [9, 2, 30, 7]):
        model, table = lean(folder), KVTable(blocks, "cpu")
        pieces = [
            run(model, Chunk(tokens[a:b], a, table, b - a))
            for a, b in [
                (0, 29),
                (29, 30),
                (30, 31),
                (31, 90),
                *((i, i + 1) for i in range(90, 100)),
            ]
        ]
        assert torch.allclose(torch.cat(pieces), whole, atol=1e-10)


def test_a_ragged_batch_equals_its_sequences_alone(pair):
    _, folder = pair
    texts = [text(60, seed) for seed in (2, 3, 4)]
    tables = [KVTable(blocks, "cpu") for blocks in ([0, 1], [8, 5], [11, 12])]
    alone = [
        run(lean(folder), Chunk(tokens, 0, table, 60))
        for tokens, table in zip(texts, tables, strict=True)
    ]
    model = lean(folder)
    first = run(
        model,
        *(
            Chunk(t[:n], 0, table, want)
            for t, table, n, want in zip(texts, tables, (40, 14, 58), (0, 1, 3), strict=True)
        ),
    )
    second = run(
        model,
        *(
            Chunk(t[n:], n, table, 60 - n)
            for t, table, n in zip(texts, tables, (40, 14, 58), strict=True)
        ),
    )
    assert torch.allclose(first, torch.cat([alone[1][13:14], alone[2][55:58]]), atol=1e-10)
    assert torch.allclose(
        second, torch.cat([alone[0][40:], alone[1][14:], alone[2][58:]]), atol=1e-10
    )


def test_later_kv_is_not_seen_and_is_overwritten(pair):
    _, folder = pair
    tokens, table = text(40), KVTable([1, 2], "cpu")
    model = lean(folder)
    run(model, Chunk(text(50, 9), 0, table, 0))
    logits = torch.cat(
        [
            run(model, Chunk(tokens[:24], 0, table, 24)),
            run(model, Chunk(tokens[24:], 24, table, 16)),
        ]
    )
    assert torch.allclose(logits, run(lean(folder), Chunk(tokens, 0, table, 40)), atol=1e-10)


def test_a_pass_that_wants_no_logits_returns_none(pair):
    assert run(lean(pair[1]), Chunk([1, 2], 0, KVTable([0], "cpu"), 0)).shape == (
        0,
        SHAPE["vocab_size"],
    )


def test_rope_tables_rotate_position_zero_by_nothing():
    cos, sin = rope_tables(LlamaConfig(10, 8, 8, 1, 1, 1, 8), 3)
    assert torch.equal(cos[0], torch.ones(8))
    assert torch.equal(sin[0].abs(), torch.zeros(8))
    assert torch.equal(sin[2, :4], -sin[2, 4:])


def test_a_table_finds_and_reads_positions_in_its_blocks():
    slots = 8 * BLOCK_TOKENS
    table, pool = KVTable([4, 6], "cpu"), torch.arange(slots * 2).view(slots, 2)
    first, last, next_one = 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1, 6 * BLOCK_TOKENS
    assert table.slots[[0, BLOCK_TOKENS - 1, BLOCK_TOKENS]].tolist() == [first, last, next_one]
    assert len(table) == 2 * BLOCK_TOKENS
    for positions in (1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS):
        assert torch.equal(table.read(pool, positions), pool[table.slots[:positions]])
