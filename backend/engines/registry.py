"""The registry that makes an engine from a setting: what a kind's module answers, which
``backend.kinds`` names.

Functions that few kinds have are asked where they are there (``Kind.answer``), and so are
constants. ``REFUSES``: request attributes that it does not serve, with the reason.
``RUNS_IN_TARGET``: a draft that reads its target runs in one with lookahead. ``LEAST_CAPABILITY``,
``GPU_PACKAGE``: what it needs on a GPU; ``GPU_DTYPES``: those of its dtypes that it runs there, if
not all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.latency_cases import Case
from backend.engines.port import Engine, Footprint
from backend.sequence import BLOCK_TOKENS


class NotPreparedError(ConfigError):
    """A folder that is not converted yet: ``spindle prepare`` or the first start does it."""


@dataclass(frozen=True, slots=True)
class Service:
    """The deployment that an engine is made for."""

    config: ServingConfig
    threads: int  # of a CPU
    path: Callable[[EngineConfig], Path]  # the folder of an engine's model
    count: Callable[..., None] | None = None  # (metric, amount, **labels), of an engine's own

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers, counted from 1 and ascending, whose output drafts read."""
        layers: set[int] = set()
        for draft in self.config.drafts:
            if draft.kind.reads_target:
                layers.update(module_of(draft).taps(self.path(draft)))
        return tuple(sorted(layers))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that step engines are made with."""
        limits, k_max = self.config.limits, self.config.policy.k_max
        return {
            "kv_blocks": limits.kv_cache_tokens // BLOCK_TOKENS,
            "max_context_tokens": limits.max_context_tokens,
            "max_draft_tokens": max(1, k_max),
        }


class KindModule(Protocol):
    """The functions of a kind's module. A kind without a model needs only ``make``."""

    def make(self, engine: EngineConfig, service: Service) -> Engine:
        """Load a target or a draft; heavy libraries are imported only now."""
        ...

    def check_folder(
        self,
        key: str,
        engine: EngineConfig,
        config: ServingConfig,
        path: Callable[[EngineConfig], Path],
    ) -> None:
        """Raise ConfigError, beginning with the setting ``key``, for a model folder (by ``path``)
        that cannot be served. The embedded model is not asked for.
        """
        ...

    def footprint(self, engine: EngineConfig, config: ServingConfig, folder: Path) -> Footprint:
        """Return what an engine will take of memory; asked where the kind is ``measured``."""
        ...

    def latency_cases(self, *, target: bool) -> list[Case]:
        """Return the passes to measure; asked where the kind is ``measured``."""
        ...

    def convert(
        self,
        engine: EngineConfig,
        folder: Path,
        service: Service,
        say: Callable[[str], None],
    ) -> None:
        """Convert the folder that a setting names where the engine needs that, unless the cache has
        it; ``say`` is given what it takes. Drafts are asked first.
        """
        ...

    def served_folder(self, folder: Path) -> Path:
        """Return the converted form of the folder that a setting names. Raises NotPreparedError
        where there is none yet.
        """
        ...

    def taps(self, folder: Path) -> tuple[int, ...]:
        """Return the target's layers that a draft reads; asked where it ``reads_target``."""
        ...


def module_of(engine: EngineConfig) -> KindModule:
    """Return the module that answers for an engine's kind."""
    return cast(KindModule, import_module(engine.kind.module))


def make_engine(engine: EngineConfig, service: Service) -> Engine:
    """Load a target or a draft."""
    return module_of(engine).make(engine, service)
