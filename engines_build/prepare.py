"""Bring everything that a serving configuration needs and this machine lacks: ``python -m engines_build.prepare --config FILE``.

It converts the embedded model when a configuration names it and measures a latency table when none fits. What is there and whole is left
alone, so a second run costs the reading of the files; what is damaged is made again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from backend import cache
from backend.app import model_path
from backend.config import EMBEDDED_MODEL, ServingConfig, load_config
from backend.tables import missing_tables, timed_engines
from engines_build.convert import convert, embedded_gguf


def prepare(config: ServingConfig) -> None:
    """Convert and measure what is missing. Raises ConfigError or ConvertError saying what cannot be had."""
    engines = timed_engines(config)
    if config.target not in engines:
        return
    with cache.exclusive():
        if any(engine.model == EMBEDDED_MODEL for engine in engines):
            bring_embedded_model()
        folders = {engine.name: model_path(engine) for engine in engines}
        if missing := missing_tables(config, folders):
            print(f"there is no sound latency table of {', '.join(missing)}: measuring", flush=True)
            from engines_build.measure import measure  # it imports torch, which a prepared machine need not

            measure(config, folders, missing)


def bring_embedded_model() -> None:
    """Convert the embedded model unless the cache holds all of it, by the hashes of its files. Raises ConvertError."""
    folder = cache.model_folder(EMBEDDED_MODEL)
    if folder.exists():
        try:
            cache.check(folder, hashes=True)
        except cache.CacheError as error:
            print(f"making again what is damaged: {error}", flush=True)
        else:
            return
    convert(embedded_gguf(), folder)


def main() -> None:
    """Prepare for one configuration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="a serving.json")
    args = parser.parse_args()
    try:
        prepare(load_config(args.config))
    except OSError as error:
        sys.exit(f"error: the cache {cache.root()} cannot be read or written: {error}. SPINDLE_CACHE chooses another place")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
