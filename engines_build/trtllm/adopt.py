"""Make a ``serving.json`` of NVIDIA's model: ``python -m engines_build.trtllm.adopt
tensorrt_llm/config.pbtxt``.

Reads the parameters of a ``tensorrt_llm`` model as ``fill_template.py`` left them and prints the
settings that mean the same here, for the engine folder that it names; parameters without a
counterpart are named on standard error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.engines.tensorrt_llm.folder import EngineFolder, read_engine_folder

_PARAMETER = re.compile(r'key:\s*"([^"]+)"\s*value:\s*\{\s*string_value:\s*"([^"]*)"', re.S)
_KV = {
    "kv_cache_free_gpu_mem_fraction": ("free_gpu_memory_fraction", float),
    "max_tokens_in_paged_kv_cache": ("max_tokens", int),
    "kv_cache_host_memory_bytes": ("host_cache_size", int),
    "sink_token_length": ("sink_token_length", int),
}
"""Parameters that are fields of the LLM API's ``kv_cache_config``, and their types."""

_USED = (
    *_KV,
    "gpt_model_path",
    "tokenizer_dir",
    "enable_kv_cache_reuse",
    "enable_chunked_context",
    "max_queue_size",
    "exclude_input_in_output",
    "gpt_model_type",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
)
"""Parameters with a counterpart, and those that each request says here."""


def read_parameters(path: Path) -> dict[str, str]:
    """Return the parameters that are set; one that is empty or still a template's ``${...}`` is
    not. Raises ConfigError.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    parameters = {
        key: value
        for key, value in _PARAMETER.findall(text)
        if value and not value.startswith("${")
    }
    if "gpt_model_path" not in parameters:
        raise ConfigError(
            f"{path} sets no gpt_model_path: it is not the filled configuration of a "
            f"tensorrt_llm model"
        )
    return parameters


def adopt(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings, and one sentence for each parameter that has no counterpart. Raises
    ConfigError for an engine that cannot be read.
    """
    parameters = read_parameters(path)
    engine = read_engine_folder(Path(parameters["gpt_model_path"]))
    args: dict[str, Any] = {}
    if kv := {
        name: read(parameters[key]) for key, (name, read) in _KV.items() if key in parameters
    }:
        args["kv_cache_config"] = kv
    if "enable_chunked_context" in parameters:
        args["enable_chunked_prefill"] = _is_true(parameters["enable_chunked_context"])
    limits: dict[str, Any] = {
        "max_active_requests": engine.max_batch_size,
        "max_context_tokens": engine.max_context_tokens,
    }
    if "max_queue_size" in parameters:
        limits["max_queued_requests"] = int(parameters["max_queue_size"])
    if "enable_kv_cache_reuse" in parameters and not engine.verifies_drafts:
        limits["enable_kv_cache_reuse"] = _is_true(parameters["enable_kv_cache_reuse"])
    name = path.resolve().parent.name
    target = {"engine": "tensorrt_llm", "name": name, "model": str(engine.folder)}
    settings = {
        "target": target | ({"engine_args": args} if args else {}),
        "policy": {"kind": "none"},
        "limits": limits,
    }
    return settings, _notes(name, parameters, engine)


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")


def _notes(name: str, parameters: dict[str, str], engine: EngineFolder) -> list[str]:
    notes = [
        f"{name}: {key} {value!r} has no counterpart"
        for key, value in parameters.items()
        if key not in (*_USED, "gpu_device_ids")
    ]
    if gpus := parameters.get("gpu_device_ids"):
        first = gpus.split(";")[0]
        notes.append(f"{name}: start the server with CUDA_VISIBLE_DEVICES={first}")
    if engine.verifies_drafts:
        notes.append(
            f"{name}: its engine takes draft tokens from outside, which the LLM API does not send: "
            f"it is served without drafts. For drafts serve its checkpoint"
        )
    if (where := parameters.get("tokenizer_dir")) and not (
        engine.folder / "tokenizer.json"
    ).is_file():
        notes.append(
            f"{name}: copy tokenizer.json and generation_config.json of {where} to {engine.folder}"
        )
    return notes


def main() -> None:
    """Print the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.trtllm.adopt",
        description="Print a serving.json with the settings of NVIDIA's tensorrt_llm model.",
        epilog="example: python -m engines_build.trtllm.adopt tensorrt_llm/config.pbtxt",
    )
    parser.add_argument("file", type=Path, help="its filled config.pbtxt")
    args = parser.parse_args()
    try:
        settings, notes = adopt(args.file)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(*notes, sep="\n", file=sys.stderr)
    print(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
