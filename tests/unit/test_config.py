import json
from dataclasses import replace

import pytest

from backend.checked_settings import ConfigError
from backend.config import load_config, parse_config
from backend.engine_config import slower_on_cpus, unused_gpus
from tests.fakes.machine import AVX2_FLAGS, BF16_FLAGS, CUDA_PACKAGES, H100, V100, FakeMachine

TORCH = {"engine": "torch", "model": "m"}
WRONG = {"device": "cuda:1", "dtype": "int8"}


def test_defaults_are_those_of_the_embedded_deployment():
    config = parse_config({"target": TORCH})
    assert (config.limits.max_context_tokens, config.policy.k_max, config.threads) == (
        2048,
        8,
        "auto",
    )
    assert config.triton.decoupled_mode is True


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [(BF16_FLAGS, "bf16"), (AVX2_FLAGS, "fp32"), ("", "fp32")],
)
def test_auto_depends_on_what_the_processor_multiplies(flags, dtype):
    machine = FakeMachine(flags=flags)
    config = parse_config({"target": TORCH, "drafts": [{**TORCH, "name": "a"}]}, machine)
    assert (config.target.dtype, config.drafts[0].dtype) == (dtype, dtype)
    config = parse_config(
        {"target": {**TORCH, "dtype": "fp64"}, "drafts": [{**TORCH, "name": "a", "dtype": "bf16"}]}
    )
    assert (config.target.dtype, config.drafts[0].dtype) == ("fp64", "bf16")
    assert parse_config({"target": {**TORCH, "device": "cuda"}}).target.dtype == "bf16"


GPU = FakeMachine(flags=BF16_FLAGS, gpu_lines=[H100], packages=CUDA_PACKAGES)
OLD_GPU = FakeMachine(flags=BF16_FLAGS, gpu_lines=[V100], packages=CUDA_PACKAGES)
NO_GPU = FakeMachine(flags=BF16_FLAGS, gpu_lines=[], packages=CUDA_PACKAGES)


@pytest.mark.parametrize(
    ("machine", "device", "expected", "reason"),
    [
        (GPU, "auto", ("cuda", "cuda"), ""),
        (GPU, "cuda", ("cuda", "cuda"), ""),
        (GPU, "cuda:0", ("cuda", "cuda:0"), ""),
        (GPU, "cpu", ("openvino", "cpu"), ""),
        (OLD_GPU, "auto", ("openvino", "cpu"), "has compute capability 7.0, below 8.0"),
        (OLD_GPU, "cuda", ("torch", "cuda"), "has compute capability 7.0, below 8.0"),
        (NO_GPU, "auto", ("openvino", "cpu"), ""),
        (NO_GPU, "cuda", ("torch", "cuda"), "no NVIDIA GPU is visible"),
    ],
)
def test_auto_is_the_engine_of_gpus_where_that_can_run(machine, device, expected, reason):
    config = parse_config({"target": {"model": "m", "device": device}}, machine)
    assert (config.target.engine, config.target.device) == expected
    found = unused_gpus(config.engines, machine)
    assert found.get("target", "").endswith(reason)
    assert bool(found) is bool(reason)


@pytest.mark.parametrize(
    ("target", "limits", "expected"),
    [
        ({"device": "cuda"}, {}, 2048),
        ({"device": "cuda", "engine": "torch"}, {"max_queued_requests": 3}, 2048),
        ({"device": "cuda"}, {"prefill_chunk_tokens": 512}, 512),
        ({"device": "cpu"}, {}, 256),
    ],
)
def test_prompts_run_in_larger_chunks_on_a_gpu(target, limits, expected):
    config = parse_config({"target": {"model": "m", **target}, "limits": limits}, GPU)
    assert config.limits.prefill_chunk_tokens == expected


@pytest.mark.parametrize(
    ("device", "limits", "expected"),
    [
        ("cuda", {}, 0),
        ("cuda", {"kv_cache_tokens": 4096}, 4096),
        ("cpu", {}, 32768),
        ("cpu", {"kv_cache_tokens": 0}, None),
        ("cuda", {"kv_cache_tokens": 255}, None),
    ],
)
def test_kv_is_sized_to_a_gpu_unless_it_is_set(device, limits, expected):
    raw = {"target": {"model": "m", "device": device}, "limits": limits}
    if expected is None:
        with pytest.raises(ConfigError, match=r"limits.kv_cache_tokens must be >= 256, or 0 on a"):
            parse_config(raw, GPU)
    else:
        assert parse_config(raw, GPU).limits.kv_cache_tokens == expected


def test_auto_is_torch_for_a_number_format_that_the_engine_of_gpus_lacks():
    config = parse_config({"target": {"model": "m", "device": "cuda", "dtype": "fp32"}}, GPU)
    assert config.target.engine == "torch"
    assert unused_gpus(config.engines, GPU)["target"] == "it does not run fp32 on a GPU"


@pytest.mark.parametrize(
    ("shape", "engine", "reason"),
    [
        ({"hidden_size": 4096, "num_attention_heads": 32}, "cuda", ""),
        ({"hidden_size": 3200, "num_attention_heads": 32}, "torch", "heads of 100 columns"),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 96}, "torch", "of 96 columns"),
        ({"draft_vocab_size": 500}, "torch", "draft_vocab_size 500"),
    ],
)
def test_auto_asks_the_model_folder(tmp_path, shape, engine, reason):
    (tmp_path / "model").mkdir()
    raw = {"architectures": ["LlamaForCausalLM"], **shape}
    (tmp_path / "model/config.json").write_text(json.dumps(raw))
    target = {"model": "model", "device": "cuda"}
    config = parse_config({"target": target}, GPU, folder=tmp_path)
    assert config.target.engine == engine
    assert reason in unused_gpus(config.engines, GPU).get("target", "")


@pytest.mark.parametrize(
    ("model", "engine", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "openvino", ""),
        ({"architectures": ["NewForCausalLM"]}, "openvino", ""),
        (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0},
            "torch",
            "soft-caps of attention scores (50)",
        ),
    ],
)
def test_auto_means_torch_for_a_model_that_openvino_cannot_run(tmp_path, model, engine, reason):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(model))
    config = parse_config({"target": {"model": "model"}}, folder=tmp_path)
    assert config.target.engine == engine
    assert slower_on_cpus(config.engines).get("target", "").endswith(reason)
    named = replace(config, target=replace(config.target, engine="openvino"))
    assert slower_on_cpus(named.engines) == {}


def test_a_draft_that_reads_the_target_follows_it_to_its_device():
    drafts = [
        {"engine": "head", "name": "head", "model": "h", "device": "auto"},
        {"engine": "suffix", "name": "suffix", "device": "auto"},
        {"engine": "torch", "name": "small", "model": "s", "device": "auto"},
    ]
    for device, expected in (("cpu", ["cpu", "cpu", "cuda"]), ("auto", ["cuda", "cpu", "cuda"])):
        config = parse_config({"target": {"model": "m", "device": device}, "drafts": drafts}, GPU)
        assert [draft.device for draft in config.drafts] == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"target": {**TORCH, "device": "gpu"}}, ["target.device", "'auto'", "'gpu'"]),
        ({"target": TORCH, "tarjet": {}}, ["tarjet", "did you mean 'target'?"]),
        ({"target": TORCH, "x": {}}, ["x", "known here"]),
        ({"target": {**TORCH, "dtyp": "bf16"}}, ["target.dtyp"]),
        ({"target": {**TORCH, "dtype": "fp8"}}, ["target.dtype", "fp8", "bf16"]),
        ({"target": {**TORCH, "lookahead": 1}}, ["target.lookahead must be 0", "'cuda'", "got 1"]),
        ({"target": {"engine": "tests.fakes.fake", "lookahead": 2}}, ["target.lookahead", "2"]),
        (
            {
                "target": {"engine": "tests.fakes.fake"},
                "drafts": [{"name": "d0", "engine": "tests.fakes.fake", "lookahead": 1}],
            },
            ["drafts[0].lookahead must be 0 except for a target of", "got 1"],
        ),
        (
            {"target": {**TORCH, "dtype": "int8"}},
            ["target.dtype", "int8", "'bf16', 'fp32', 'fp64'", "'torch'"],
        ),
        (
            {"target": {**TORCH, "engine": "cuda", "device": "cuda:1", "dtype": "fp32"}},
            ["target.dtype must be one of 'bf16'", "'cuda' on cuda:1, got 'fp32'"],
        ),
        (
            {"target": {**TORCH, "engine": "openvino", "device": "cuda"}},
            ["target.device", "'cpu'", "'openvino'", "cuda"],
        ),
        *(
            (
                {
                    "target": {**TORCH, "device": "cuda"},
                    "drafts": [{**TORCH, "engine": name, "name": "d", **WRONG}],
                },
                ["drafts[0].dtype 'int8' needs the device 'cpu'", "got 'cuda:1'"],
            )
            for name in ("head", "eagle")
        ),
        ({"target": {"engine": "lookup"}}, ["target.engine", "lookup"]),
        (
            {"target": {**TORCH, "attention": "padded"}},
            ["target.attention", "removed", "each context at its own length"],
        ),
        (
            {"target": TORCH, "policy": {"cohorts": 2}},
            ["policy.cohorts", "removed", "one batch is faster", "remove it"],
        ),
        ({"target": {"engine": "torch"}}, ["target.model"]),
        ({"target": TORCH, "drafts": {}}, ["drafts", "list"]),
        (
            {"target": TORCH, "drafts": [{"engine": "lookup", "name": "target"}]},
            ["drafts[0].name", "target"],
        ),
        (
            {"target": TORCH, "drafts": [{"engine": "lookup", "name": "a", "min_ngram": 5}]},
            ["drafts[0].min_ngram", "5"],
        ),
        ({"target": TORCH, "policy": {"k_max": -1}}, ["policy.k_max", "-1"]),
        ({"target": TORCH, "policy": {"selection": "ucb"}}, ["policy", "selection"]),
        ({"target": TORCH, "policy": {"k_max": True}}, ["policy.k_max", "True"]),
        ({"target": TORCH, "policy": {"kind": "fixed", "draft": "x"}}, ["policy.draft", "x"]),
        ({"target": TORCH, "policy": {"kind": "smartspec"}}, ["policy.draft", "''"]),
        (
            {"target": TORCH, "policy": {"kind": "average"}},
            ["policy.kind 'average' was renamed to 'ema'"],
        ),
        (
            {"target": TORCH, "policy": {"kind": "adaptiv"}},
            ["policy.kind", "adaptiv", "'ema'", "my_package."],
        ),
        (
            {"target": TORCH, "policy": {"kind": "my-package.Mine"}},
            ["policy.kind", "my-package.Mine"],
        ),
        ({"target": TORCH, "policy": {"options": {"length": 2}}}, ["policy.options", "length"]),
        ({"target": TORCH, "policy": {"kind": "a.B", "options": [2]}}, ["policy.options", "[2]"]),
        (
            {
                "target": TORCH,
                "drafts": [{"name": "lookup", "engine": "lookup"}],
                "policy": {"kind": "schedule", "draft": "lookup"},
            },
            ["policy.schedule", "[]"],
        ),
        (
            {"target": TORCH, "limits": {"max_active_requests": 0}},
            ["limits.max_active_requests", "0"],
        ),
        ({"target": TORCH, "log": {"format": "xml"}}, ["log.format", "xml", "json"]),
        ({"target": TORCH, "log": {"level": "INFO"}}, ["log.level", "INFO", "info"]),
        ({"target": TORCH, "threads": 0}, ["threads", "0"]),
        ({"target": TORCH, "threads": "all"}, ["threads", "all"]),
        ([], ["object"]),
    ],
)
def test_a_bad_setting_is_refused_by_key_and_value(raw, words):
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    assert all(word in str(error.value) for word in words)


def test_a_file_that_is_missing_or_not_json_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json is not JSON"):
        load_config(tmp_path / "bad.json")


def test_errors_of_a_file_name_the_file(tmp_path):
    path = tmp_path / "serving.json"
    path.write_text(json.dumps({"target": TORCH, "x": 1}))
    with pytest.raises(ConfigError, match=r"serving\.json: unknown key 'x'"):
        load_config(path)
