"""NVIDIA's filled model configurations become settings."""

from pathlib import Path

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines.tensorrt_llm.kind import check_folder
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


def test_engine_and_limits_become_settings_that_are_accepted(tmp_path):
    folder = engine_folder(tmp_path, "big", vocab_size=9, tp_size=2)
    path = model(
        tmp_path,
        "tensorrt_llm",
        gpt_model_path=folder,
        gpu_device_ids="1,2;3,4",
        tokenizer_dir="/models/big",
        kv_cache_free_gpu_mem_fraction="0.5",
        enable_kv_cache_reuse="true",
        enable_chunked_context="true",
        max_queue_size="512",
    )
    settings, notes = adopt(path)
    config = parse_config(settings)
    assert (config.target.engine, config.target.name, config.target.model) == (
        "tensorrt_llm",
        "tensorrt_llm",
        str(folder),
    )
    assert config.target.engine_args == {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
        "enable_chunked_prefill": True,
    }
    limits = config.limits
    assert (
        limits.max_active_requests,
        limits.max_context_tokens,
        limits.max_queued_requests,
        limits.enable_kv_cache_reuse,
    ) == (8, 128, 512, True)
    assert notes == [
        "tensorrt_llm: start the server with CUDA_VISIBLE_DEVICES=1,2",
        f"tensorrt_llm: copy tokenizer.json and generation_config.json of /models/big to {folder}",
    ]
    (folder / "tokenizer.json").write_text("{}")
    check_folder("target", config.target, config, lambda engine: Path(engine.model))


def test_an_engine_for_drafts_from_outside_is_served_without_and_says_so(tmp_path):
    folder = engine_folder(tmp_path, "big", vocab_size=9, max_draft_len=5)
    settings, notes = adopt(model(tmp_path, "tensorrt_llm", gpt_model_path=folder))
    assert settings["limits"]["max_context_tokens"] == 128 - 5
    assert len(notes) == 1
    assert "it is served without drafts" in notes[0]


def test_a_parameter_without_a_counterpart_is_named(tmp_path):
    folder = engine_folder(tmp_path, "big", vocab_size=9)
    _, notes = adopt(
        model(tmp_path, "tensorrt_llm", gpt_model_path=folder, executor_worker_path="/opt/worker")
    )
    assert notes == ["tensorrt_llm: executor_worker_path '/opt/worker' has no counterpart"]


def test_a_template_that_was_never_filled_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sets no gpt_model_path"):
        read_parameters(model(tmp_path, "tensorrt_llm", gpt_model_path="${engine_dir}"))
