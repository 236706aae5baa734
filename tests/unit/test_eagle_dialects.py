"""Published heads of every dialect are read as they are meant, and others are refused by name."""

import json
import os
import pickle
import re
from dataclasses import replace

import pytest
import torch

from backend.checked_settings import ConfigError
from backend.engines.eagle.dialects import read_published
from backend.published_heads import is_published_head
from tests.fakes import checkpoints
from tests.fakes.eagle import DIALECTS, TARGET, published, random_head, write

FORMS = {
    "plain": ({}, DIALECTS),
    "every token, the target's rows": ({"draft_vocab_size": 96, "own_head": False}, DIALECTS),
    "its own embedding": ({"own_embedding": True, "hidden_size": 16, "head_dim": 4}, DIALECTS),
    "a bias": ({"fc_bias": True}, DIALECTS),
    "a rope and heads of its own": (
        {"rope": checkpoints.LLAMA3, "rope_theta": 5e5, "head_dim": 12},
        ("flat", "speculators"),
    ),
    "3.1, all states together": ({"fuse": "joint", "norm_output": True}, ("flat", "speculators")),
    "3.1, each state": ({"fuse": "each"}, ("flat", "speculators")),
    "normed residual, window, qk norms": (
        {"norm_before_residual": True, "sliding_window": 9, "qk_norm": True},
        ("speculators",),
    ),
}
CASES = [(form, dialect) for form, (_, dialects) in FORMS.items() for dialect in dialects]


def read(folder, dialect="flat", config=(), tensors=(), without=(), target=TARGET, **shape):
    """Publish a random head with changes, and read it; a setting of None is left out."""
    raw, named = published(dialect, *random_head(**shape))
    raw = {name: value for name, value in (raw | dict(config)).items() if value is not None}
    named = {name: one for name, one in (named | dict(tensors)).items() if name not in without}
    return read_published(write(folder, dialect, raw, named), target)


def is_head(folder):
    return is_published_head(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(("form", "dialect"), CASES)
def test_a_head_is_read_as_it_was_published(form, dialect, tmp_path):
    shape, tensors = random_head(**FORMS[form][0])
    folder = write(tmp_path / "head", dialect, *published(dialect, shape, tensors))
    found = read_published(folder, TARGET)
    assert found.dialect == dialect
    assert found.shape == shape
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert is_head(folder)


ROWS = {
    "a shortlist": {},
    "every token": {"draft_vocab_size": None},
    "every token, the target's rows": {"draft_vocab_size": None, "own_head": False},
    "its own embedding": {"own_embedding": True},
}


@pytest.mark.parametrize("rows", [90, 102])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", ROWS)
def test_a_head_whose_vocabulary_is_padded_otherwise_gets_the_target_s_rows(
    form, dialect, rows, tmp_path
):
    sizes = {name: rows if value is None else value for name, value in ROWS[form].items()}
    shape, tensors = random_head(vocab_size=rows, **sizes)
    folder = write(tmp_path / "head", dialect, *published(dialect, shape, tensors))
    found, ids = read_published(folder, replace(TARGET, tokens=88)), tensors["token_ids"]
    kept = ids < TARGET.vocab_size
    assert found.tensors["token_ids"].tolist() == ids[kept].tolist()
    assert (found.shape.vocab_size, found.shape.draft_vocab_size) == (96, int(kept.sum()))
    if shape.own_head:
        assert torch.equal(found.tensors["lm_head.weight"], tensors["lm_head.weight"][kept])
    if shape.own_embedding:
        embedding, shared = found.tensors["embed_tokens.weight"], min(rows, 96)
        assert torch.equal(embedding[:shared], tensors["embed_tokens.weight"][:shared])
        assert not embedding[shared:].any()
    assert {name: list(size) for name, size in found.shape.tensors().items()} == {
        name: list(tensor.shape) for name, tensor in found.tensors.items()
    }


def test_a_head_with_fewer_rows_than_the_target_has_tokens_is_refused(tmp_path):
    shape, tensors = random_head(vocab_size=90)
    folder = write(tmp_path, "flat", *published("flat", shape, tensors))
    with pytest.raises(ConfigError, match="vocab_size is 90, its target's 96"):
        read_published(folder, replace(TARGET, tokens=91))


def test_names_of_other_writers_are_the_same_tensors(tmp_path):
    shape, tensors = random_head(fuse="each")
    raw, named = published("flat", shape, tensors)
    for tap, name in enumerate(("low", "mid", "high")):
        named[f"aux_norm_{name}.weight"] = named.pop(f"fc_norm.{tap}.weight")
    named = {f"model.{name}".replace("layers.0", "midlayer"): t for name, t in named.items()}
    raw |= {"use_aux_norm": raw.pop("fc_norm")}
    named["rotary_emb.inv_freq"] = torch.ones(4)
    found = read_published(write(tmp_path, "flat", raw, named), TARGET)
    assert found.shape == shape
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_folder_without_rope_theta_has_the_default_and_never_the_target_s(tmp_path):
    found = read(tmp_path, "SafeAILab", {"rope_theta": None})
    assert found.shape.rope_theta == 10000.0


def test_the_trained_length_is_the_folder_s(tmp_path):
    assert read(tmp_path, config={"max_position_embeddings": 777}).shape.trained_tokens == 777


def test_rows_of_another_dtype_are_kept_as_they_are(tmp_path):
    raw, named = published("SafeAILab", *random_head())
    half = {n: t.half() if t.is_floating_point() else t for n, t in named.items()}
    found = read_published(write(tmp_path, "SafeAILab", raw, half), TARGET)
    assert found.tensors["fc.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("dialect", "ids", "layers"),
    [
        ("SafeAILab", None, (2, 4, 5)),  # 2, n // 2, n - 3 of 8 layers
        ("speculators", None, (2, 4, 5)),
        ("flat", [1, 3, 4], (2, 4, 5)),  # outputs, counted from 0
        ("flat", [2, 4, 5], (2, 4, 5)),  # boundaries
        ("flat", [1, 4, 8], (1, 4, 8)),  # the last boundary
        ("speculators", [1, 3, 4], (1, 3, 4)),  # as it says: the probe measures
        ("speculators", [0, 3, 4], (1, 4, 5)),  # no layer is number 0
    ],
)
def test_layers_are_counted_by_the_likelier_convention(dialect, ids, layers, tmp_path):
    name = "eagle_aux_hidden_state_layer_ids"
    change = {"eagle_config": {name: ids}} if dialect == "flat" else {name: ids}
    found = read(tmp_path, dialect, {} if dialect == "SafeAILab" else change)
    assert (found.shape.layers, found.states_layers) == (layers, ids is not None)


def test_speculators_residual_is_normed_where_it_says_nothing(tmp_path):
    found = read(tmp_path, "speculators", {"norm_before_residual": None})
    assert (found.shape.norm_before_residual, found.states_residual) == (True, False)
    found = read(tmp_path / "flat", "flat")
    assert (found.shape.norm_before_residual, found.states_residual) == (False, False)


def test_a_flag_may_stand_in_eagle_config_or_at_the_top(tmp_path):
    inner = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    for at, change in enumerate(
        (
            {"norm_before_fc": True, "eagle_config": inner},
            {"eagle_config": inner | {"norm_before_fc": True}},
        )
    ):
        assert read(tmp_path / str(at), config=change, fuse="joint").shape.fuse == "joint"


def test_d2t_that_is_not_needed_is_followed_all_the_same(tmp_path):
    turn = torch.arange(96).roll(1)
    found = read(
        tmp_path, tensors={"d2t": turn - torch.arange(96)}, draft_vocab_size=96, own_head=True
    )
    assert torch.equal(found.tensors["token_ids"], turn)


ONES = torch.ones(2, 2)
QUANTISED = {"lm_head.weight_scale": ONES}
REFUSALS = {
    "LoRA": ({"tensors": {"q_proj.lora_A": ONES}}, "it is a LoRA of the target together with"),
    "Medusa": ({"config": {"medusa_num_heads": 4}}, "it is Medusa's heads"),
    "P-EAGLE": ({"tensors": {"mask_hidden": ONES}}, "it is P-EAGLE, which drafts in parallel"),
    "P-EAGLE of speculators": (
        {"config": {"speculators_model_type": "peagle"}, "dialect": "speculators"},
        "it is P-EAGLE",
    ),
    "DSpark": ({"config": {"dflash_config": {"markov_rank": 8}}}, "it is DSpark"),
    "DFlash": ({"config": {"architectures": ["DFlashDraftModel"]}}, "it is DFlash"),
    "MTP": ({"tensors": {"model.layers.61.eh_proj.weight": ONES}}, r"\(MTP\)"),
    "MLA": ({"tensors": {"midlayer.self_attn.kv_b_proj.weight": ONES}}, r"latent attention \(MLA"),
    "quantised": ({"tensors": QUANTISED}, "it is a quantised head: use the one in bf16"),
    "quantised by config": ({"config": {"quantization_config": {"bits": 4}}}, "a quantised head"),
    "MLP speculator": ({"config": {"model_type": "mlp_speculator"}}, "it is an MLP speculator"),
    "EAGLE-1": ({"without": ["layers.0.hidden_norm.weight"]}, "an EAGLE-1 or EAGLE-2 head"),
    "several layers": ({"config": {"num_hidden_layers": 4}}, r"\(num_hidden_layers 4\)"),
    "a second layer": ({"tensors": {"layers.1.mlp.up_proj.weight": ONES}}, "several layers"),
    "the last layer only": (
        {"config": {"eagle_config": {"use_aux_hidden_state": False}}},
        "use_aux_hidden_state is false",
    ),
    "activation": ({"config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
    "another layer": (
        {"tensors": {"layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}},
        r"self_attn\.q_proj\.weight reads 32 numbers; an EAGLE-3 head of width 32 reads 64",
    ),
    "target's width": (
        {"config": {"target_hidden_size": 64}},
        "target_hidden_size is 64, its target's 32",
    ),
    "states' width": (
        {"tensors": {"fc.weight": torch.ones(32, 100)}},
        r"fc\.weight reads 100 numbers, no multiple of its target's hidden_size 32",
    ),
    "vocabulary": ({"config": {"vocab_size": 2000}}, "vocab_size is 2000, its target's 96"),
    "number of layers": (
        {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}},
        r"it reads the layers \[2, 4\]; fc\.weight is for 3 layers, of a target of 8",
    ),
    "layer above the target": (
        {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}},
        r"it reads the layers \[2, 4, 9\]",
    ),
    "layers that are no numbers": (
        {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2,4,5"}}},
        r"eagle_aux_hidden_state_layer_ids must be a list of numbers, got '2,4,5'",
    ),
    "no layers": (
        {"layers": (2, 5), "config": {"eagle_config": {"use_aux_hidden_state": True}}},
        r"fc\.weight reads 2 layers, and config\.json names none",
    ),
    "rope": ({"config": {"rope_scaling": {"type": "yarn"}}}, "rope_type is 'yarn'"),
    "rope without its numbers": (
        {"config": {"rope_scaling": {"rope_type": "linear"}}},
        "rope_type 'linear' needs factor",
    ),
    "rope by layer": (
        {"config": {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}},
        "rope_parameters differ by type of layer: full_attention",
    ),
    "part of a rope": ({"config": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "no d2t": ({"without": ["d2t"]}, "d2t is missing: draft_vocab_size 40 of 96 tokens"),
    "short d2t": ({"tensors": {"d2t": torch.zeros(39).long()}}, "d2t has 39 rows"),
    "d2t out of the vocabulary": (
        {"tensors": {"d2t": torch.full((40,), 80)}},
        "d2t reaches from 80 to 119, of a vocabulary of 96 tokens",
    ),
    "d2t that repeats": (
        {"tensors": {"d2t": 1 - torch.arange(40) % 2}},
        "d2t names only 20 different tokens in 40 rows",
    ),
    "t2d that contradicts": (
        {"tensors": {"t2d": torch.ones(96, dtype=torch.bool)}},
        "t2d has 96 tokens, which are not those of d2t",
    ),
    "no head": (
        {"without": ["lm_head.weight"]},
        r"lm_head\.weight is missing, and draft_vocab_size 40 is not the target's 96",
    ),
    "no embedding": (
        {"hidden_size": 16, "head_dim": 4},
        r"embed_tokens\.weight is missing, and the target's is 32 wide, not 16",
    ),
    "no head of its width": (
        {
            "hidden_size": 16,
            "head_dim": 4,
            "draft_vocab_size": 96,
            "own_head": False,
            "own_embedding": True,
        },
        r"lm_head\.weight is missing, and the target's is 32 wide, not 16",
    ),
    "a flag without its tensor": (
        {"config": {"norm_before_fc": True}},
        "norm_before_fc is True, and the tensors for it are missing",
    ),
    "a tensor whose flag is off": (
        {"fuse": "each", "config": {"fc_norm": False}},
        "fc_norm is False, and the tensors for it are there",
    ),
    "both norms": (
        {"fuse": "each", "tensors": {"input_norm.weight": torch.ones(96)}},
        r"both input_norm\.weight and fc_norm",
    ),
    "unknown tensors": (
        {"tensors": {"layers.0.self_attn.q_proj.bias": ONES}},
        r"unknown tensors self_attn\.q_proj\.bias",
    ),
    "a missing tensor": (
        {"without": ["layers.0.mlp.up_proj.weight"]},
        r"mlp\.up_proj\.weight should be \[48, 32\] by config\.json, is missing",
    ),
    "a misshaped tensor": (
        {"tensors": {"norm.weight": torch.ones(31)}},
        r"norm\.weight should be \[32\] by config\.json, is \[31\]",
    ),
    "a tensor by two names": (
        {"tensors": {"model.norm.weight": torch.ones(32)}},
        r"two of its tensors are norm\.weight",
    ),
    "a number that is none": (
        {"config": {"intermediate_size": "48"}},
        "intermediate_size in config.json must be a positive number, got '48'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_by_field_and_value(case, tmp_path):
    changes, text = REFUSALS[case]
    with pytest.raises(ConfigError, match=text) as refusal:
        read(tmp_path / "head", **changes)
    assert str(refusal.value).startswith(f"{tmp_path / 'head'} cannot be served: ")
    if ": it is " in str(refusal.value):  # another kind, which no change of a value would serve
        assert re.search(": (use|merge) ", str(refusal.value))


def test_a_dialect_that_is_not_known_is_refused_with_what_a_report_needs(tmp_path):
    raw = {"architectures": ["EagleFourForCausalLM"], "new_key": 1}
    tensors = {f"blocks.{at}.weight": ONES for at in range(50)}
    with pytest.raises(ConfigError) as refusal:
        read_published(write(tmp_path, "flat", raw, tensors), TARGET)
    text = str(refusal.value)
    assert "unknown EAGLE-3 format" in text
    assert "config.json has architectures, new_key" in text
    assert "blocks.0.weight, blocks.1.weight" in text
    assert "and 10 more" in text


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_code_in_a_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw, _ = published("SafeAILab", *random_head())
    folder = write(tmp_path / "head", "SafeAILab", raw, {})
    torch.save({"fc.weight": Harm()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin has more than tensors"):
        read_published(folder, TARGET)
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Harm(), file, protocol=2)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        read_published(folder, TARGET)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("", b"", r"has neither \*\.safetensors nor pytorch_model\*\.bin"),
        ("pytorch_model.bin", b"cut", r"pytorch_model\.bin"),
        ("model.safetensors", b"cut", r"model\.safetensors is damaged"),
        ("model.safetensors", checkpoints.LFS_POINTER.encode(), "safetensors is a Git LFS pointer"),
        ("pytorch_model.bin", checkpoints.LFS_POINTER.encode(), "model.bin is a Git LFS pointer"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"fc.weight": "absent.safetensors"}}',
            r"cannot read .*absent\.safetensors: No such file",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"fc.weight": "../x.safetensors"}}',
            r"weight_map names '\.\./x\.safetensors', which is outside the folder",
        ),
    ],
)
def test_missing_and_damaged_weights_are_named(name, content, text, tmp_path):
    raw, _ = published("SafeAILab", *random_head())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        read_published(tmp_path, TARGET)


def test_weights_in_parts_are_joined_and_none_is_there_twice(tmp_path):
    raw, named = published("flat", *random_head())
    names = sorted(named)
    write(tmp_path, "flat", raw, {name: named[name] for name in names[:5]})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    write(tmp_path, "flat", raw, {name: named[name] for name in names[5:]})
    assert len(read_published(tmp_path, TARGET).tensors) == len(random_head()[1])
    write(tmp_path, "flat", raw, {name: named[name] for name in names[4:]})
    with pytest.raises(ConfigError, match=f"tensor {names[4]} is in two files"):
        read_published(tmp_path, TARGET)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_that_calls_itself_a_llama_is_one_all_the_same(dialect, architectures, tmp_path):
    raw, named = published(dialect, *random_head())
    assert is_head(write(tmp_path, dialect, raw | {"architectures": architectures}, named))


def test_a_llama_is_no_head_nor_is_a_shortlisted_draft(tmp_path):
    assert not is_head(checkpoints.folder(tmp_path, "llama"))
    assert not is_head(checkpoints.folder(tmp_path, "draft", draft_vocab_size=2))
    folder = write(tmp_path / "starcoder", "flat", {}, {"layers.0.mlp.c_fc.weight": ONES})
    assert not is_head(folder)
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"damaged!" * 4)
    assert not is_head(tmp_path / "llama")
