"""Makes the configured policy, the times that it plans by and the file of its trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import policy
from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.port import Engine
from backend.ops.stats import StepStats
from policy import LatencyTable, custom
from policy.baselines import BASELINES, BaselineSettings
from policy.guard import Guard
from policy.loops import compiling
from policy.replay import TracedPlanner

logger = logging.getLogger(__name__)

OVERHEAD_S, SPECULATION_S = 5e-4, 3e-4
"""Start values that no table has: a step's overhead, and what speculating adds to it. Measured
steps correct them.
"""


FIRST_PLAIN_STEPS = 4
"""Plain steps of each octave of rows on a server that has learnt nothing: the first changes the
width of the pass, the others teach.
"""


def make_policy(
    config: ServingConfig,
    drafts: list[Engine],
    tables: Mapping[str, LatencyTable],
    stats: StepStats,
    padded_tokens: int = 0,
) -> policy.AnyPolicy:
    """Make the configured policy for these drafts; ``tables`` by the names of the engines that run
    a model; an engine that pads runs ``padded_tokens`` for every row if any speculates.
    """
    if config.policy.kind == "none" or not drafts:
        return policy.NoSpeculation()
    latency, names = latency_model(config, tables), tuple(draft.name for draft in config.drafts)
    settings = config.policy
    if settings.is_custom:
        with _naming_kind():
            return custom.load_policy(
                settings.kind, names, latency, settings.k_max, settings.options
            )
    if settings.kind != "adaptive":
        schedule = {step.batch: step.length for step in settings.schedule}
        arguments = settings.draft, settings.length, schedule, settings.options
        return BASELINES[settings.kind].make(
            BaselineSettings(names, latency, settings.k_max, *arguments)
        )
    scored = all(draft.limits.scores or draft.limits.free for draft in drafts)
    constants = policy.PlannerConfig(
        k_max=config.policy.k_max,
        catchup_scored=scored,
        padded_tokens=padded_tokens,
        first_plain_steps=FIRST_PLAIN_STEPS if config.target.kind.measured else 0,
        whole_batch=all(draft.limits.whole_batch for draft in drafts),
    )
    planner = policy.AdaptivePlanner(names, latency, constants)
    outermost: policy.AnyPolicy = planner
    if file := config.policy.trace_file:
        outermost = TracedPlanner(planner, _TraceFile(Path(file), stats), config.policy.trace_lines)
    return Guard(outermost) if config.policy.guard else outermost


def check_policy(config: ServingConfig) -> None:
    """Raise ConfigError for a user's policy that cannot be imported, before engines are loaded."""
    if config.policy.is_custom:
        with _naming_kind():
            custom.import_policy(config.policy.kind)


def compile_planner(say: Callable[[str], None], stats: StepStats | None = None) -> None:
    """Compile the planner's loops or load them from the cache; ``say`` it if that takes long, and
    count in ``stats`` that it will again.
    """
    if not compiling.is_cached():
        say("compiling the planner, about 30 s at the first start")
    compiling.compile_all()
    if stats is None:
        return
    for problem in compiling.problems:
        logger.warning(
            "the compiled planner cannot be cached, every start compiles it again: %s", problem
        )
        stats.fallback("planner_not_cached")


@contextmanager
def _naming_kind() -> Iterator[None]:
    """Raise a PolicyError as a ConfigError that names the setting."""
    try:
        yield
    except custom.PolicyError as error:
        raise ConfigError(f"policy.kind {error}") from error


def latency_model(config: ServingConfig, tables: Mapping[str, LatencyTable]) -> policy.LatencyModel:
    """Return the times of a deployment's passes. Raises LatencyError naming the engines without a
    table.
    """
    times = {
        engine.name: tables.get(engine.name) or _known_times(engine) for engine in config.engines
    }
    return policy.LatencyModel.from_tables(
        times.pop(config.target.name), times, OVERHEAD_S, SPECULATION_S
    )


def _known_times(engine: EngineConfig) -> LatencyTable | None:
    """Return the times of an engine that needs no measuring; None for one that runs a model."""
    seconds = engine.step_s or engine.kind.known_s
    if not engine.kind.known_s:
        return None
    return policy.LatencyTable.synthetic(engine.name, {1: seconds, 64: seconds})


class _TraceFile:
    """Writes a planner's trace to a new file. A line that cannot be written ends the trace, with a
    metric, and never a step.
    """

    def __init__(self, path: Path, stats: StepStats) -> None:
        self._path, self._stats = path, stats
        self._file: TextIO | None = None
        self._over = False

    def __call__(self, line: str) -> None:
        """Write a line."""
        if self._over:
            return
        try:
            if self._file is None:
                self._file = self._path.open("w", buffering=1, encoding="utf-8")
            self._file.write(line + "\n")
        except OSError:
            self._over = True
            logger.exception("the planner's trace cannot be written to %s", self._path)
            self._stats.fallback("trace_file_error")
