"""NVIDIA's filled model configurations become settings."""

from pathlib import Path

import pytest

from backend.config import parse_config
from backend.engines.trtllm.deployment import check_engines
from backend.sequence import BLOCK_TOKENS
from backend.settings import ConfigError
from engines_build.trtllm.adopt import adopt, read_parameters
from tests.contract.engine_folders import engine_folder


def model(path, name, **parameters):
    """A ``config.pbtxt`` as ``fill_template.py`` leaves it: parameters that were given, and
    templates.
    """
    folder = path / "models" / name
    folder.mkdir(parents=True)
    given = {"max_beam_width": "${max_beam_width}", "lora_prefetch_dir": "", **parameters}
    blocks = [
        f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}'
        for key, value in given.items()
    ]
    (folder / "config.pbtxt").write_text(
        'name: "tensorrt_llm"\n# key: "commented" value: { string_value: "out" }\n'
        + "\n".join(blocks)
    )
    return folder / "config.pbtxt"


def models(path, **target):
    big = engine_folder(path, "big", vocab_size=9, max_draft_len=5, tp_size=2)
    small = engine_folder(path, "small", vocab_size=9)
    return (
        model(path, "tensorrt_llm", gpt_model_path=big, gpu_device_ids="1,2;3,4", **target),
        model(
            path,
            "tensorrt_llm_draft",
            gpt_model_path=small,
            gpu_device_ids="0",
            tokenizer_dir="/models/small",
        ),
    )


def test_engines_gpus_and_limits_become_settings_that_are_accepted(tmp_path):
    target, draft = models(
        tmp_path, kv_cache_free_gpu_mem_fraction="0.5", executor_worker_path="/opt/worker"
    )
    settings, notes = adopt(target, [draft])
    config = parse_config(settings)
    assert (config.target.name, config.target.gpus, config.target.worker) == (
        "tensorrt_llm",
        (1, 2),
        "/opt/worker",
    )
    assert [(d.name, d.engine) for d in config.drafts] == [
        ("tensorrt_llm_draft", "trtllm"),
        ("lookup", "lookup"),
    ]
    assert (
        config.policy.k_max,
        config.limits.max_active_requests,
        config.limits.max_context_tokens,
    ) == (5, 8, 118)
    assert notes == [
        "tensorrt_llm: kv_cache_free_gpu_mem_fraction 0.5 is planned here (kv_share)",
        f"tensorrt_llm_draft: copy tokenizer.json and generation_config.json of /models/small to "
        f"{tmp_path / 'small'}",
    ]


def test_what_has_no_counterpart_is_named(tmp_path):
    target, draft = models(tmp_path, enable_kv_cache_reuse="true", max_attention_window_size="1024")
    _, notes = adopt(target, [draft])
    assert "tensorrt_llm: max_attention_window_size '1024' has no counterpart" in notes
    assert not [
        note
        for note in notes
        if "enable_kv_cache_reuse" in note or "lora" in note or "commented" in note
    ]


def test_engines_with_a_small_token_budget_get_settings_that_are_accepted_and_a_note(tmp_path):
    big = engine_folder(tmp_path, "target", vocab_size=9, max_draft_len=5, max_num_tokens=100)
    small = engine_folder(tmp_path, "draft", vocab_size=9, max_num_tokens=90)
    paths = [
        model(tmp_path, f"{folder.name}_model", gpt_model_path=folder) for folder in (big, small)
    ]
    settings, notes = adopt(paths[0], paths[1:])
    assert settings["limits"]["max_context_tokens"] == 2 * BLOCK_TOKENS - 5 - 1
    assert notes == [
        "an iteration takes at most 90 tokens of text, by the engines' max_num_tokens; build "
        "them with 512 for more"
    ]
    for entry in (settings["target"], settings["drafts"][0]):
        (Path(entry["model"]) / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    check_engines(parse_config(settings), lambda engine: Path(engine.model))


def test_a_template_that_was_never_filled_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sets no gpt_model_path"):
        read_parameters(model(tmp_path, "tensorrt_llm", gpt_model_path="${engine_dir}"))


def test_engines_that_cannot_serve_are_refused_with_the_command_that_builds_them_again(tmp_path):
    plain = model(
        tmp_path, "tensorrt_llm", gpt_model_path=engine_folder(tmp_path, "plain", vocab_size=9)
    )
    with pytest.raises(
        ConfigError, match=r"without --speculative_decoding_mode.*Build it again: trtllm-build"
    ):
        adopt(plain, [])
