"""The description of a folder's decoder, kept in the cache: only its first reading imports
transformers.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from backend.engines.models.spec import AttentionSpec, DecoderSpec, PlainLlama
from backend.files import read_text
from backend.storage import cache

FORMAT = 4
"""Raised when the same folder would have another description."""


def read_spec(folder: Path) -> DecoderSpec:
    """Return the description of a folder's decoder. Raises ConfigError with the reason for one that
    is not served.
    """
    config = read_text(folder / "config.json")
    key = json.dumps([FORMAT, metadata.version("transformers"), config])
    file = cache.spec_file(hashlib.sha256(key.encode()).hexdigest()[:32])
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _restore(json.loads(file.read_text("utf-8")))
    from backend.engines.models.probe import probe  # it imports transformers

    spec = probe(folder)
    with suppress(OSError):  # a cache that cannot be written is asked again
        cache.publish_file(file, json.dumps(asdict(spec), indent=1) + "\n")
    return spec


def _restore(stored: dict[str, Any]) -> DecoderSpec:
    layers = tuple(AttentionSpec(**layer) for layer in stored.pop("layers"))
    llama = stored.pop("llama")
    return DecoderSpec(**stored, layers=layers, llama=llama and PlainLlama(**llama))
