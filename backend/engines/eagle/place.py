"""The cache's place for converted heads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from backend.engines.eagle.folder import ARCHITECTURE
from backend.engines.registry import NotPreparedError
from backend.published_heads import PICKLES, SAFETENSORS
from backend.storage import cache
from backend.storage.manifest import read_model_config, sampled_sha256, weights_sha256

FORMAT = 1
"""Raised when the same folder would be converted to another one."""


def place_of(published: Path) -> Path:
    """Return where the converted form of a published head lies in the cache, or will lie."""
    files = sorted([*published.glob(SAFETENSORS), *published.glob(PICKLES)])
    config = (published / "config.json").read_text("utf-8")
    parts = [FORMAT, config, sampled_sha256(files)]
    return cache.head_folder(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])


def is_converted(place: Path, target: Path) -> bool:
    """Return whether the cache has all of a converted head for the target in a folder."""
    try:
        cache.check(place)
    except cache.CacheError:
        return False
    return made_for(place) == weights_sha256(target)


def made_for(converted: Path) -> str:
    """Return the hash of the target's weights that a head was converted for (``weights_sha256``);
    empty where its folder does not say.
    """
    return str(read_model_config(converted).get("target_sha256", ""))


def is_ours(folder: Path) -> bool:
    """Return whether a folder has our form already."""
    return ARCHITECTURE in (read_model_config(folder).get("architectures") or ())


def served_folder(folder: Path) -> Path:
    """Return the folder that an engine reads for a head in ``folder``: this one where it has our
    form. Raises NotPreparedError where it is to be converted first.
    """
    if is_ours(folder):
        return folder
    place = place_of(folder)
    if not place.is_dir():
        raise NotPreparedError(f"{folder} is not converted yet: run `spindle prepare`")
    return place
