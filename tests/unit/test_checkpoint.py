import json

import pytest
import torch
from safetensors.torch import save_file

from backend.engines.checkpoint import CheckpointError, LlamaConfig, load, parse_config
from backend.settings import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, CONFIG)


def write(path, config, **changed):
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.rand(shape).bfloat16() for name, shape in parse_config(config).shapes().items()
    }
    tensors |= changed
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path / "model.safetensors",
    )
    return path


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_a_folder_gives_its_configuration_and_weights_in_the_dtype_asked_for(
    folder, dtype, torch_dtype
):
    config, weights = load(folder, dtype)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.tied) == (
        2,
        2,
        2,
        False,
    )
    assert set(weights) == set(config.shapes())
    assert {tensor.dtype for tensor in weights.values()} == {torch_dtype}


def test_shards_are_joined(folder):
    _, expected = load(folder, "fp32")
    names = sorted(expected)
    save_file({name: expected[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: expected[name] for name in names[5:]}, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, weights = load(folder, "fp32")
    assert all(torch.equal(weights[name], expected[name]) for name in names)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*b\.safetensors: No such file"):
        load(folder)


def test_rope_settings_are_read_in_the_old_and_in_the_new_style():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = parse_config(CONFIG | {"rope_theta": 500000.0, "rope_scaling": scaling})
    new = parse_config(CONFIG | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert old.rope_theta == new.rope_theta == 500000.0
    assert {key: new.rope[key] for key in scaling} == dict(old.rope) == scaling
    assert parse_config(CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert parse_config(CONFIG | {"rope_scaling": None}).rope["rope_type"] == "default"


def test_qwen2_has_biases_on_qkv_alone_and_llama_with_attention_bias_also_on_the_output():
    qwen = parse_config(
        CONFIG
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
            "sliding_window": 4096,
        }
    ).shapes()
    llama = parse_config(CONFIG | {"attention_bias": True}).shapes()
    assert qwen["model.layers.1.self_attn.k_proj.bias"] == (4,)
    assert "model.layers.1.self_attn.o_proj.bias" not in qwen
    assert llama["model.layers.1.self_attn.o_proj.bias"] == (8,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "sliding_window 4096 is not supported",
        ),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
    ],
)
def test_what_the_forward_would_get_wrong_is_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(CONFIG | change)


def test_a_missing_setting_is_named():
    with pytest.raises(CheckpointError, match="hidden_size is missing"):
        parse_config({key: value for key, value in CONFIG.items() if key != "hidden_size"})


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
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, CONFIG, **{name: tensor}))


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load(folder)


def test_an_unknown_dtype_and_a_broken_config_are_named(folder):
    with pytest.raises(CheckpointError, match="got 'int4'"):
        load(folder, "int4")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load(folder)


def test_a_tied_head_needs_no_tensor_and_a_stored_copy_is_ignored(tmp_path):
    _, weights = load(
        write(
            tmp_path,
            CONFIG | {"tie_word_embeddings": True},
            **{"lm_head.weight": torch.rand(11, 8)},
        )
    )
    assert "lm_head.weight" not in weights


def test_shapes_cover_every_parameter_of_transformers_model():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert LlamaConfig(11, 8, 12, 2, 4, 2, 2).shapes() == expected
