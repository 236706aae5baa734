"""The sizes of a folder's decoder, kept in the cache: only finding them imports transformers."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from backend.files import read_text
from backend.storage import cache
from backend.storage.manifest import named

FORMAT = 3
"""Raised when the same folder would have other sizes."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes that memory and checks depend on (``probe.DecoderSpec`` documents the fields)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    weights: int
    looked_up: int
    experts: int
    tied: bool
    kv_width: int
    row_width: int
    softcap: float
    """The largest bound of a layer's scores; 0: none."""


def shape_of_decoder(folder: Path) -> DecoderShape:
    """Return the sizes of a folder's decoder. Raises ConfigError with the reason for one that is
    not served.
    """
    config = read_text(folder / "config.json")
    key = json.dumps([FORMAT, metadata.version("transformers"), config])
    file = cache.shape_file(hashlib.sha256(key.encode()).hexdigest()[:32])
    with suppress(OSError, ValueError, TypeError):
        return DecoderShape(**json.loads(file.read_text("utf-8")))
    shape = _probed(folder)
    with suppress(OSError):  # a cache that cannot be written is asked again
        cache.publish_file(file, json.dumps(asdict(shape), indent=1) + "\n")
    return shape


def check_decoder(key: str, folder: Path) -> DecoderShape:
    """Return the same. Raises ConfigError beginning with the setting ``key``."""
    with named(key):
        return shape_of_decoder(folder)


def _probed(folder: Path) -> DecoderShape:
    from backend.engines.models.probe import probe  # it imports transformers

    spec = probe(folder)
    return DecoderShape(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=len(spec.layers),
        weights=spec.weights,
        looked_up=spec.looked_up,
        experts=spec.experts,
        tied=spec.tied,
        kv_width=spec.kv_width,
        row_width=spec.row_width,
        softcap=max(layer.softcap for layer in spec.layers),
    )
