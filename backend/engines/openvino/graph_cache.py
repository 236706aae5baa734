"""Converted graphs in the cache: each is made once and then read, without transformers.

A graph is of its folder's weights and configuration, of the packages that made it, of the engine's
dtype, and of the layers that drafts read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib import metadata
from pathlib import Path

from backend.storage import cache
from backend.storage.manifest import weights_sha256

logger = logging.getLogger(__name__)

FORMAT = 3
"""Raised when the same folder would be converted to another graph."""

GRAPH = "graph.xml"


def graph_folder(folder: Path, dtype: str, taps: Seq[int] = (), head: str = "") -> Path:
    """Return where a folder's graph lies in the cache, or will lie."""
    versions = [metadata.version(name) for name in ("openvino", "transformers", "torch")]
    config = (folder / "config.json").read_text("utf-8")
    parts = [FORMAT, weights_sha256(folder), config, versions, dtype, list(taps), head]
    return cache.graph_folder(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])


def has_graph(place: Path) -> bool:
    """Return whether the cache has all of a graph."""
    try:
        cache.check(place)
    except cache.CacheError:
        return False
    return True


def bring_graph(
    folder: Path,
    dtype: str,
    taps: Seq[int] = (),
    say: Callable[[str], None] = logger.info,
    head: str = "",
) -> Path:
    """Return the file of a folder's graph, which is converted first unless the cache has it;
    ``head``: the dtype of the head, if it is another.

    ``say`` is given what that will take before it begins. Raises CheckpointError for a folder that
    cannot be served, or when there is too little memory.
    """
    place = graph_folder(folder, dtype, taps, head)
    if not has_graph(place):
        from backend.engines.openvino.conversion import convert_folder  # it imports transformers

        provenance = {"folder": str(folder), "dtype": dtype, "taps": list(taps), "head": head}
        with cache.publish(place, provenance) as fresh:
            convert_folder(folder, dtype, taps, fresh / GRAPH, say, head)
    return place / GRAPH
