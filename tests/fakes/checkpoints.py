"""Folders that look like checkpoints of a model, without one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

VOCABULARY = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}})
"""A tokenizer of two tokens."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""A rope that is stretched."""

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 12345\n"
"""The content of a file that was cloned without Git LFS."""


def folder(
    path: Path,
    name: str,
    tokenizer: str | None = VOCABULARY,
    shape: tuple[int, int] = (2, 2),
    **config: Any,
) -> Path:
    """Make a Llama's folder with one tensor; settings of None are left out."""
    made = path / name
    made.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        **config,
    }
    (made / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    if tokenizer is not None:
        (made / "tokenizer.json").write_text(tokenizer)
    return made
