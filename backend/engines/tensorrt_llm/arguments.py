"""Arguments of TensorRT-LLM's ``LLM`` and settings of our drafter, from ``serving.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.tensorrt_llm.folder import is_engine_folder, read_engine_folder

PLUG_IN = "Spindle"
"""``speculative_config.decoding_type`` of our drafter (``backend.hosts.tensorrt_llm``)."""

_OWN = (
    "model",
    "backend",
    "skip_tokenizer_init",
    "max_batch_size",
    "max_seq_len",
    "max_beam_width",
    "guided_decoding_backend",
    "stream_interval",
)
"""Arguments that follow from serving.json, or that the contract depends on."""

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_LENGTHS = ("max_draft_len", "num_nextn_predict_layers")


def drafter(engine: EngineConfig) -> tuple[str, int]:
    """Return name and longest proposal of the drafter (``HostedModule``)."""
    for name in _OWN:
        if name in engine.engine_args:
            raise ConfigError(f"engine_args.{name} follows from other settings: leave it out")
    spec = engine.engine_args.get("speculative_config")
    if spec is None:
        return "", 0
    if not isinstance(spec, dict) or not isinstance(spec.get("decoding_type"), str):
        raise ConfigError(
            f"engine_args.speculative_config must have a decoding_type: {PLUG_IN!r} or one of "
            f"TensorRT-LLM's, got {spec!r}"
        )
    length = next((spec[name] for name in _LENGTHS if name in spec), 0)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"engine_args.speculative_config.max_draft_len must be at least 1, got {length!r}"
        )
    return spec["decoding_type"].lower(), length


def llm_arguments(engine: EngineConfig, config: ServingConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of ``LLM`` in the words of its YAML files: the user's, and those that
    follow from our settings. A drafter of ours is not among them.
    """
    limits, args = config.limits, dict(engine.engine_args)
    spec = args.get("speculative_config")
    if spec is not None and (spec["decoding_type"] == PLUG_IN or config.policy.kind == "none"):
        del args["speculative_config"]
    kv = {"enable_block_reuse": limits.enable_kv_cache_reuse, **args.pop("kv_cache_config", {})}
    follows: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_batch_size": limits.max_active_requests,
        "kv_cache_config": kv,
    }
    if is_engine_folder(folder):
        engine_folder = read_engine_folder(folder)
        ranks = {
            "tensor_parallel_size": engine_folder.tp_size,
            "pipeline_parallel_size": engine_folder.pp_size,
        }
        return {**follows, **ranks, **args}
    return {
        **follows,
        "max_seq_len": limits.max_context_tokens,
        "dtype": _DTYPES.get(engine.dtype, "auto"),
        "enable_chunked_prefill": True,
        **args,
    }


def plug_in_settings(engine: EngineConfig, config: ServingConfig) -> dict[str, Any] | None:
    """Return the settings of our drafter as of ``backend.hosts.settings``; None where another one
    proposes, or none.
    """
    spec = engine.engine_args.get("speculative_config") or {}
    if spec.get("decoding_type") != PLUG_IN or config.policy.kind == "none":
        return None
    policy = json.loads(json.dumps(asdict(config.policy)))  # as it would be in a file
    del policy["k_max"]
    drafts = spec.get("drafts", [{"engine": "suffix", "name": "suffix"}])
    policy["draft"] = drafts[0]["name"]  # of baselines, which have one
    options = {k: v for k, v in spec.items() if k not in ("decoding_type", *_LENGTHS)}
    limits = {"max_active_requests": config.limits.max_active_requests}
    return {**options, "drafts": drafts, "policy": policy, "limits": limits}


def vocabulary(folder: Path) -> int:
    """Return the size of a model's vocabulary. Raises ConfigError."""
    if is_engine_folder(folder):
        return read_engine_folder(folder).vocab_size
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if "vocab_size" not in text:
        raise ConfigError(f"{folder / 'config.json'} has no vocab_size")
    return int(text["vocab_size"])
