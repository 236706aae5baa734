"""Reads a folder made by ``trtllm-build``. TensorRT-LLM is not needed to read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from backend.checked_settings import ConfigError

_EXTERNAL = (2, "DRAFT_TOKENS_EXTERNAL")
"""Values of ``build_config.speculative_decoding_mode`` of a target that verifies draft tokens from
outside.
"""


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """The limits of one engine, in tokens, requests and ranks."""

    folder: Path
    version: str
    """TensorRT-LLM's, which built it."""
    vocab_size: int
    tp_size: int
    pp_size: int
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    verifies_drafts: bool
    """It takes draft tokens from outside, as NVIDIA's ``tensorrt_llm_bls`` sends them."""
    paged_context_fmha: bool
    """Without it KV is not reused."""

    @property
    def ranks(self) -> int:
        """How many GPUs the engine spans."""
        return self.tp_size * self.pp_size

    @property
    def max_context_tokens(self) -> int:
        """The longest text: the builder adds the draft's length to ``max_seq_len``."""
        return self.max_seq_len - self.max_draft_len


def is_engine_folder(folder: Path) -> bool:
    """Return whether a folder holds an engine, not a checkpoint."""
    return (folder / "rank0.engine").is_file()


def read_engine_folder(folder: Path) -> EngineFolder:
    """Read ``config.json`` and look for the files of all ranks. Raises ConfigError naming the
    folder and what it lacks.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        pretrained, build = config["pretrained_config"], config["build_config"]
        mapping = pretrained.get("mapping", {})
        engine = EngineFolder(
            folder=folder,
            version=str(config.get("version", "")),
            vocab_size=int(pretrained["vocab_size"]),
            tp_size=int(mapping.get("tp_size", 1)),
            pp_size=int(mapping.get("pp_size", 1)),
            max_batch_size=int(build["max_batch_size"]),
            max_seq_len=int(build["max_seq_len"]),
            max_draft_len=int(build.get("max_draft_len", 0)),
            verifies_drafts=build.get("speculative_decoding_mode") in _EXTERNAL,
            paged_context_fmha=bool(build["plugin_config"]["use_paged_context_fmha"]),
        )
    except OSError as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'config.json'} is not the config of a TensorRT-LLM engine: {error!r}"
        ) from error
    missing = [
        f"rank{rank}.engine"
        for rank in range(engine.ranks)
        if not (folder / f"rank{rank}.engine").is_file()
    ]
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}")
    return engine
