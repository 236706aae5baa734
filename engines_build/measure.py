"""Measure how long an engine's passes take here and write latency tables: ``python -m
engines_build.measure --config FILE``.

Every engine of a configuration is timed through its port on fabricated sequences, all cases
interleaved; the least times are the cells of a ``policy.latency`` table. Other processes only ever
add time, and whatever slows down all of serving is corrected online. A table says whether other
programs took a part of the processor; the next start on a quiet machine measures again. A pass of
the target is timed right after one alike, for most are when serving; a draft right after a pass of
the target, which leaves it the processor caches that it will find there. With ``threads`` auto the
faster of 1 and all cores is found first, on a few of the cases.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from backend.config import DEFAULT_CONFIG, ServingConfig, load_config
from backend.engine_config import EngineConfig
from backend.engines.latency_cases import BASE_CONTEXT, Case, blocks_for
from backend.engines.registry import Service, make_engine, module_of
from backend.machine import Machine, machine
from backend.model_folders import model_path
from backend.sequence import BLOCK_TOKENS
from backend.speculation.learned_state import forget_times, learned_key
from backend.storage import cache
from backend.storage.manifest import read_manifest
from backend.storage.tables import read_table, table_file, timed_engines
from engines_build.progress import Progress, set_up_messages, stage
from engines_build.timing import MeasurableEngine, Rig, interleave
from policy.latency import LatencyCurve, LatencyTable, Provenance

logger = logging.getLogger(__name__)

BUDGET_S = 75.0
"""Time for the rounds of all engines together; loading and the choice of threads come on top."""

MIN_THREAD_GAIN = 0.9
"""All cores are used where they take at most this share of one thread's time."""

_SEED = 0


def probe_cases() -> list[Case]:
    """Return the few cases by which the number of threads is chosen."""
    return [
        Case(1, BASE_CONTEXT),
        Case(1, BASE_CONTEXT, length=4),
        Case(8, BASE_CONTEXT, length=1),
        Case(1, BASE_CONTEXT, new=64, run=0),
    ]


def tabulate(
    engine: str,
    cases: Sequence[Case],
    seconds: Sequence[float],
    provenance: Provenance,
    widths: tuple[int, ...] = (),
) -> LatencyTable:
    """Return the table of measured submissions: a chain of ``run`` equal passes counts as one pass
    of its share of the time. ``widths`` are the engine's (``EngineLimits``).
    """
    return LatencyTable(
        engine,
        rows=tuple(case.rows for case in cases),
        tokens=tuple(case.query_tokens for case in cases),
        context_tokens=tuple(case.rows * case.context for case in cases),
        node_context_tokens=tuple(case.rows * case.length * case.context for case in cases),
        seconds=tuple(
            time_s / max(1, case.run) for case, time_s in zip(cases, seconds, strict=True)
        ),
        provenance=provenance,
        widths=widths,
    )


def measure(
    config: ServingConfig,
    folders: Mapping[str, Path],
    names: Sequence[str] = (),
    *,
    budget_s: float = BUDGET_S,
    machine: Machine = machine,
) -> None:
    """Measure engines of a deployment (these; none named: all) and put their tables into the cache.
    ``folders``: all checkpoints by name.

    If the target is not among them its table says with how many threads.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # before torch comes: idle threads that spin would slow the others
    engines = [engine for engine in timed_engines(config) if not names or engine.name in names]
    cases = {
        engine.name: module_of(engine).latency_cases(target=engine is config.target)
        for engine in engines
    }
    is_busy = config.target.device == "cpu" and machine.is_busy()
    with stage(f"measuring {', '.join(cases)}") as progress:
        measured = config.target not in engines
        threads = _threads_of(config, folders, machine, measured=measured)
        seconds, widths = _time_all(config, engines, folders, cases, threads, budget_s, progress)
    if is_busy or (config.target.device == "cpu" and machine.is_busy()):
        is_busy = True
        logger.warning("the machine is busy: the next start on a quiet one measures again")
    for engine in engines:
        engine_cases, folder = cases[engine.name], folders[engine.name]
        table = tabulate(
            engine.name,
            engine_cases,
            [seconds[engine.name, case] for case in engine_cases],
            _provenance(engine, folder, threads, is_busy=is_busy),
            widths[engine.name],
        )
        path = table_file(engine, folder, config.threads if engine is config.target else threads)
        cache.publish_file(path, json.dumps(table.to_dict(), indent=1) + "\n")
        logger.info("%s: %s", engine.name, _digest(table))
    if config.target in engines:
        forget_times(learned_key(config, folders))


def _time_all(
    config: ServingConfig,
    engines: Sequence[EngineConfig],
    folders: Mapping[str, Path],
    cases: Mapping[str, Sequence[Case]],
    threads: int,
    budget_s: float,
    progress: Progress,
) -> tuple[dict[tuple[str, Case], float], dict[str, tuple[int, ...]]]:
    """Return the seconds of every engine's cases, each draft's after a pass of the target, and the
    widths of every engine.
    """
    rng, before, target = random.Random(_SEED), Case(1, BASE_CONTEXT), config.target
    rigs = {
        engine.name: _rig(config, engine, folders, cases.get(engine.name, [before]), threads, rng)
        for engine in (target, *(engine for engine in engines if engine != target))
    }
    work = [(name, case) for name in cases for case in cases[name]]

    def time(name: str, case: Case) -> float:
        rigs[target.name].time(case if name == target.name else before)
        if rigs[name].engine.limits.in_target:
            return rigs[target.name].time_in_target(rigs[name].engine, case)
        return rigs[name].time(case)

    samples = interleave(
        [lambda name=name, case=case: time(name, case) for name, case in work],  # type: ignore[misc]
        budget_s=budget_s,
        rng=rng,
        report=progress,
    )
    seconds = {item: min(times) for item, times in zip(work, samples, strict=True)}
    return seconds, {name: rig.engine.limits.widths for name, rig in rigs.items()}


def _threads_of(
    config: ServingConfig, folders: Mapping[str, Path], machine: Machine, *, measured: bool
) -> int:
    """Return the number of threads to measure with; that of the target's table where it is
    ``measured``.
    """
    if isinstance(config.threads, int):
        return config.threads
    if measured:
        path = table_file(config.target, folders[config.target.name], config.threads)
        return read_table(path).provenance.threads
    return choose_threads(config, folders, machine)


def probe_s(config: ServingConfig, folders: Mapping[str, Path], threads: int) -> float:
    """Return the seconds that a few typical passes of the target take with this many threads."""
    rng, cases = random.Random(_SEED), probe_cases()
    rig = _rig(config, config.target, folders, cases, threads, rng)
    samples = interleave(
        [lambda case=case: rig.time(case) for case in cases],  # type: ignore[misc]
        budget_s=5.0,
        rng=rng,
        report=lambda _done_s, _all_s: None,
        most=7,
    )
    return sum(map(min, samples))


def choose_threads(
    config: ServingConfig,
    folders: Mapping[str, Path],
    machine: Machine = machine,
    probe_s: Callable[[ServingConfig, Mapping[str, Path], int], float] = probe_s,
) -> int:
    """Return the number of threads for the target: 1, or all cores where they save a tenth on a few
    typical passes.

    One thread leaves a core to Triton's stubs, and a smaller gain drowns in noise. One after the
    other, for an engine is made for its threads, and memory may not hold it twice.
    """
    cores = machine.cores()
    if cores == 1 or config.target.device != "cpu":
        return 1
    one_s, all_s = (probe_s(config, folders, threads) for threads in (1, cores))
    logger.info("1 thread takes %.0f ms, %d take %.0f ms", one_s * 1e3, cores, all_s * 1e3)
    return cores if all_s < MIN_THREAD_GAIN * one_s else 1


def _rig(
    config: ServingConfig,
    engine: EngineConfig,
    folders: Mapping[str, Path],
    cases: Sequence[Case],
    threads: int,
    rng: random.Random,
) -> Rig:
    """Make an engine as serving does, but of the size that the cases need."""
    gc.collect()  # an engine that is no longer used goes before the next is loaded
    limits = replace(
        config.limits,
        kv_cache_tokens=blocks_for(cases) * BLOCK_TOKENS,
        max_context_tokens=max(case.context + case.new for case in cases),
    )
    longest = replace(config.policy, k_max=max(case.length + case.run for case in cases))
    sized = replace(config, limits=limits, policy=longest)
    built_engine = make_engine(engine, Service(sized, threads, lambda one: folders[one.name]))
    if not isinstance(built_engine, MeasurableEngine):
        raise TypeError(f"engine {engine.engine!r} is measured, and has no assume()")
    return Rig(built_engine, rng)


def _provenance(engine: EngineConfig, folder: Path, threads: int, *, is_busy: bool) -> Provenance:
    return Provenance(
        machine=f"{machine.processor()}, {machine.cores()} cores",
        device=engine.device,
        model=engine.model,
        model_hash=read_manifest(folder).layout_sha256,
        dtype=engine.dtype,
        threads=threads,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        torch_version=machine.package_version("torch") or "none",
        busy=is_busy,
    )


def _digest(table: LatencyTable) -> str:
    curve = LatencyCurve.fit(table)
    points = ", ".join(
        f"{count}: {curve.seconds(count) * 1e3:.2f}" for count in (1, 2, 5, 8, 16, 64)
    )
    return (
        f"ms by query tokens {points}; per row {curve.row_s * 1e3:.3f}, per 1000 cached "
        f"tokens {curve.context_s * 1e6:.2f}"
    )


def _threads(text: str) -> int | str:
    return text if text == "auto" else machine.cores() if text == "all" else int(text)


def main() -> None:
    """Measure the engines of one configuration, whether or not tables are there."""
    parser = argparse.ArgumentParser(
        prog="spindle measure",
        description="Measure the engines' passes on this machine again.",
        epilog="example: spindle measure --config my/serving.json",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        help="settings file (default: the shipped serving.json)",
    )
    parser.add_argument("--verbose", action="store_true", help="print the figures")
    parser.add_argument(
        "--threads", type=_threads, help="threads: auto, all or a number (default: as configured)"
    )
    args = parser.parse_args()
    set_up_messages(verbose=args.verbose)
    try:
        config = load_config(args.config)
        config = config if args.threads is None else replace(config, threads=args.threads)
        with cache.exclusive():
            measure(config, {engine.name: model_path(engine) for engine in timed_engines(config)})
    except (OSError, ValueError) as error:
        sys.exit(f"spindle: error: {error}")
    except KeyboardInterrupt:
        sys.exit("spindle: stopped: nothing was written")


if __name__ == "__main__":
    main()
