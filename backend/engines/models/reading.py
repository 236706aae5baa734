"""A target's description and embeddings, kept in the cache: only their first reading imports
transformers or torch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.engines.checkpoint import StoredMatrix, map_embeddings
from backend.engines.models.spec import AttentionSpec, DecoderSpec, PlainLlama
from backend.files import read_text
from backend.storage import cache
from backend.storage.manifest import weights_sha256

logger = logging.getLogger(__name__)

FORMAT = 6
"""Raised when the same folder would have another description."""


def read_spec(folder: Path) -> DecoderSpec:
    """Return the description of a folder's decoder. Raises ConfigError with the reason for one that
    is not served.
    """
    subject = [FORMAT, read_text(folder / "config.json")]
    return _restore(cache.recall(subject, "transformers", lambda: _describe(folder)))


def bring_embeddings(
    target: Path, say: Callable[[str], None] = logger.info
) -> tuple[StoredMatrix, StoredMatrix]:
    """Return the target's embedding and head in files: its own, or if they are quantised, the
    cache's, which torch writes first.
    """
    if (mapped := map_embeddings(target)) is not None:
        return mapped
    key = hashlib.sha256(f"embeddings {weights_sha256(target)}".encode()).hexdigest()[:32]
    place = cache.head_folder(key)
    try:
        cache.check(place)
    except cache.CacheError:
        with cache.require_packages(f"widening the embedding of {target}"):
            from backend.engines.weights import save_embeddings
        say(f"widening the embedding of {target}, once")
        with cache.publish(place, {"folder": str(target)}) as fresh:
            save_embeddings(target, fresh)
    mapped = map_embeddings(place)
    assert mapped is not None  # nothing in that folder is quantised
    return mapped


def _describe(folder: Path) -> dict[str, Any]:
    with cache.require_packages(f"reading {folder} for the first time"):
        from backend.engines.models.probe import probe
    return asdict(probe(folder))


def _restore(stored: dict[str, Any]) -> DecoderSpec:
    layers = tuple(AttentionSpec(**layer) for layer in stored.pop("layers"))
    llama = stored.pop("llama")
    return DecoderSpec(**stored, layers=layers, llama=llama and PlainLlama(**llama))
