"""Make a ``serving.json`` of NVIDIA's models: ``python -m engines_build.trtllm.adopt
TARGET/config.pbtxt [DRAFT/config.pbtxt ...]``.

Reads the parameters of ``tensorrt_llm`` models as ``fill_template.py`` left them and prints the
settings that mean the same here; what has no counterpart is named on standard error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from backend.engines.trtllm.folder import (
    EngineFolder,
    check_draft,
    check_target,
    read_engine_folder,
    token_budget,
)
from backend.sequence import BLOCK_TOKENS
from backend.settings import ConfigError

_PARAMETER = re.compile(r'key:\s*"([^"]+)"\s*value:\s*\{\s*string_value:\s*"([^"]*)"', re.S)
_SETTLED = (
    "enable_kv_cache_reuse",
    "enable_chunked_context",
    "exclude_input_in_output",
    "gpt_model_type",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
)
"""Settings that are always the same here (chunked context: off), or each request's to say."""

_USED = (
    "gpt_model_path",
    "gpu_device_ids",
    "executor_worker_path",
    "tokenizer_dir",
    "kv_cache_free_gpu_mem_fraction",
)


def read_parameters(path: Path) -> dict[str, str]:
    """Return the parameters that are set; one that is empty or still a template's ``${...}`` is
    not. Raises ConfigError.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    found = {
        key: value
        for key, value in _PARAMETER.findall(text)
        if value and not value.startswith("${")
    }
    if "gpt_model_path" not in found:
        raise ConfigError(
            f"{path} sets no gpt_model_path: it is not the filled configuration of a "
            f"tensorrt_llm model"
        )
    return found


def adopt(target_path: Path, draft_paths: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings, and one sentence for each parameter that has no counterpart. Raises
    ConfigError for engines that do not fit.
    """
    parameters = [read_parameters(path) for path in (target_path, *draft_paths)]
    engines = [read_engine_folder(Path(found["gpt_model_path"])) for found in parameters]
    names = _names([target_path, *draft_paths])
    target, drafts = engines[0], engines[1:]
    check_target(target, 1)
    for draft in drafts:
        check_draft(draft, target)
    entries = [
        _entry(name, found, engine)
        for name, found, engine in zip(names, parameters, engines, strict=True)
    ]
    k_max, budget = min(target.max_draft_len, 64), min(engine.max_num_tokens for engine in engines)
    context = min(
        *(engine.max_context_tokens for engine in engines),
        budget // BLOCK_TOKENS * BLOCK_TOKENS - k_max - 1,
    )
    limits = {
        "max_active_requests": target.max_batch_size,
        "max_context_tokens": context,
        "prefill_chunk_tokens": context,
    }
    settings = {
        "target": entries[0],
        "drafts": [*entries[1:], {"engine": "lookup", "name": "lookup"}],
        "policy": {"k_max": k_max},
        "limits": limits,
    }
    notes = [
        note for name, found in zip(names, parameters, strict=True) for note in _notes(name, found)
    ]
    if budget < (whole := token_budget(target.max_batch_size, context, k_max)):
        notes.append(
            f"an iteration takes at most {budget} tokens of text, by the engines' "
            f"max_num_tokens; build them with {whole} for more"
        )
    return settings, notes


def _names(paths: list[Path]) -> list[str]:
    """Name engines by their models' folders."""
    names = [path.resolve().parent.name for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError(f"models must have folders of different names, got {names}")
    return names


def _entry(name: str, parameters: dict[str, str], engine: EngineFolder) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "engine": "trtllm",
        "name": name,
        "model": str(engine.folder),
        "gpus": list(range(engine.ranks)),
    }
    if "gpu_device_ids" in parameters:
        entry["gpus"] = [int(gpu) for gpu in parameters["gpu_device_ids"].split(";")[0].split(",")]
    if "executor_worker_path" in parameters:
        entry["worker"] = parameters["executor_worker_path"]
    return entry


def _notes(name: str, parameters: dict[str, str]) -> list[str]:
    notes = [
        f"{name}: {key} {value!r} has no counterpart"
        for key, value in parameters.items()
        if key not in (*_USED, *_SETTLED)
    ]
    if "kv_cache_free_gpu_mem_fraction" in parameters:
        notes.append(
            f"{name}: kv_cache_free_gpu_mem_fraction "
            f"{parameters['kv_cache_free_gpu_mem_fraction']} is planned here (kv_share)"
        )
    if (where := parameters.get("tokenizer_dir")) and not Path(
        parameters["gpt_model_path"], "tokenizer.json"
    ).is_file():
        notes.append(
            f"{name}: copy tokenizer.json and generation_config.json of {where} to "
            f"{parameters['gpt_model_path']}"
        )
    return notes


def main() -> None:
    """Print the settings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path, help="config.pbtxt of the target's tensorrt_llm model")
    parser.add_argument("drafts", type=Path, nargs="*", help="those of draft models")
    args = parser.parse_args()
    try:
        settings, notes = adopt(args.target, args.drafts)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(*notes, sep="\n", file=sys.stderr)
    print(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
