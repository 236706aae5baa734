"""The description of a folder's decoder, kept in the cache: only its first reading imports
transformers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.engines.models.spec import AttentionSpec, DecoderSpec, PlainLlama
from backend.files import read_text
from backend.storage import cache

FORMAT = 6
"""Raised when the same folder would have another description."""


def read_spec(folder: Path) -> DecoderSpec:
    """Return the description of a folder's decoder. Raises ConfigError with the reason for one that
    is not served.
    """
    subject = [FORMAT, read_text(folder / "config.json")]
    return _restore(cache.recall(subject, "transformers", lambda: _describe(folder)))


def _describe(folder: Path) -> dict[str, Any]:
    with cache.require_packages(f"reading {folder} for the first time"):
        from backend.engines.models.probe import probe
    return asdict(probe(folder))


def _restore(stored: dict[str, Any]) -> DecoderSpec:
    layers = tuple(AttentionSpec(**layer) for layer in stored.pop("layers"))
    llama = stored.pop("llama")
    return DecoderSpec(**stored, layers=layers, llama=llama and PlainLlama(**llama))
