"""Converted graphs in the cache: each is made once and then read, without transformers.

A graph is of its folder's weights and configuration, of OpenVINO's version, of the engine's dtype,
and of the layers that drafts read. The packages that made it are recorded in its manifest.
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

FORMAT = 4
"""Raised when the same folder would be converted to another graph."""

GRAPH = "graph.xml"
MAKERS = ("transformers", "torch")
"""Packages that convert a folder."""


def graph_folder(folder: Path, dtype: str, taps: Seq[int] = (), head: str = "") -> Path:
    """Return where a folder's graph lies in the cache, or will lie."""
    version = metadata.version("openvino")
    config = (folder / "config.json").read_text("utf-8")
    parts = [FORMAT, weights_sha256(folder), config, version, dtype, list(taps), head]
    return cache.graph_folder(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])


def has_graph(place: Path) -> bool:
    """Return whether the cache has all of a graph that need not be made again."""
    try:
        provenance = cache.check(place)["provenance"]
    except cache.CacheError:
        return False
    return not cache.is_outdated(provenance["packages"])


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
    cannot be served, or when there is too little memory; ConfigError without the packages.
    """
    place = graph_folder(folder, dtype, taps, head)
    if not has_graph(place):
        with cache.require_packages(f"converting {folder} to {dtype}"):
            from backend.engines.openvino.conversion import convert_folder

        source = {"folder": str(folder), "dtype": dtype, "taps": list(taps), "head": head}
        provenance = {**source, "packages": cache.package_versions(*MAKERS)}
        with cache.publish(place, provenance) as fresh:
            convert_folder(folder, dtype, taps, fresh / GRAPH, say, head)
    return place / GRAPH
