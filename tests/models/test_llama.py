"""The description of a folder's decoder, and of a Llama the weights by name."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from backend.checked_settings import ConfigError
from backend.engines.checkpoint import CheckpointError
from backend.engines.models import probe
from backend.engines.models.llama import check_tensors, load_llama, read_llama
from backend.engines.models.reading import read_spec
from tests.fakes.checkpoints import LLAMA3

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, CONFIG)


def write(path, config, **changed):
    """A folder of random tensors, some of them changed or (None) left out."""
    (path / "config.json").write_text(json.dumps(config))
    shapes = read_llama(path).shapes()
    tensors = {name: torch.rand(shape).bfloat16() for name, shape in shapes.items()} | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")
    return path


def spec_of(path, **changes):
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_spec(path)


def test_a_description_is_kept_and_a_change_of_the_folder_gives_another(tmp_path, monkeypatch):
    first = spec_of(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert first.llama.rope["factor"] == 8.0
    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe", None)
        assert read_spec(tmp_path) == first
    assert len(spec_of(tmp_path, num_hidden_layers=3).layers) == 3


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_a_folder_gives_its_weights_in_the_dtype_asked_for(folder, dtype, torch_dtype):
    llama, weights = load_llama(folder, dtype)
    assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.ties_embeddings) == (
        2,
        2,
        2,
        False,
    )
    assert set(weights) == set(llama.shapes())
    assert {tensor.dtype for tensor in weights.values()} == {torch_dtype}


def test_shards_are_joined(folder):
    _, expected = load_llama(folder, "fp32")
    names = sorted(expected)
    save_file({name: expected[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: expected[name] for name in names[5:]}, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, weights = load_llama(folder, "fp32")
    assert all(torch.equal(weights[name], expected[name]) for name in names)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*b\.safetensors: No such file"):
        load_llama(folder, "fp32")


def test_rope_settings_are_read_in_the_old_and_in_the_new_style(tmp_path):
    old = spec_of(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3).llama
    new = spec_of(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 500000.0}).llama
    assert old == new
    assert old.rope_theta == 500000.0
    assert {key: new.rope[key] for key in LLAMA3} == LLAMA3
    linear = spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).llama
    assert (linear.rope["rope_type"], linear.rope["factor"]) == ("linear", 2.0)
    assert spec_of(tmp_path, rope_scaling=None).llama.rope["rope_type"] == "default"


@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
        (Qwen2ForCausalLM, Qwen2Config, {}),
    ],
    ids=["llama", "biases", "qwen 2"],
)
def test_shapes_cover_every_parameter_of_transformers_model(tmp_path, kind, config, changes):
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    lm = kind(config(**sizes, **changes))
    lm.save_pretrained(tmp_path)
    expected = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    assert read_llama(tmp_path).shapes() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    ],
    ids=lambda changes: next(reversed(changes)),
)
def test_more_than_a_llama_is_no_llama(tmp_path, changes):
    assert spec_of(tmp_path, **changes).llama is None
    with pytest.raises(CheckpointError, match="ForCausalLM is more than a Llama"):
        read_llama(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "its 4 heads are no multiple of its 3 of keys"),
        ({"quantization_config": {"bits": 4}}, "quantization_config names no quant_method"),
        ({"model_type": None}, "has no such model"),
    ],
)
def test_a_folder_that_would_be_wrong_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "tensor model.norm.weight is missing"),
        ("model.norm.weight", torch.rand(9), r"model.norm.weight must have shape \[8\], got \[9\]"),
        (
            "model.layers.7.mlp.up_proj.weight",
            torch.rand(3),
            "unexpected tensor model.layers.7.mlp.up_proj.weight",
        ),
    ],
)
def test_tensors_that_are_missing_misshaped_or_unexpected_are_named(
    tmp_path, name, tensor, message
):
    folder = write(tmp_path, CONFIG, **{name: tensor})
    for check in (check_tensors, lambda path: load_llama(path, "bf16")):
        with pytest.raises(CheckpointError, match=message):
            check(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_llama(folder, "bf16")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load_llama(folder, "bf16")


def test_an_unknown_dtype_and_a_broken_config_are_named(folder):
    with pytest.raises(CheckpointError, match="got 'int4'"):
        load_llama(folder, "int4")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_llama(folder, "bf16")


def test_a_tied_head_needs_no_tensor_and_a_stored_copy_is_ignored(tmp_path):
    config, head = CONFIG | {"tie_word_embeddings": True}, torch.rand(11, 8)
    folder = write(tmp_path, config, **{"lm_head.weight": head})
    check_tensors(folder)
    assert "lm_head.weight" not in load_llama(folder, "bf16")[1]
