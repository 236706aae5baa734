"""From a setting to an engine: ``backend.kinds`` says which module makes which kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from backend.config import ConfigError, EngineConfig, ServingConfig
from backend.engines.head.folder import read_config
from backend.engines.port import Engine
from backend.sequence import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Service:
    """What an engine is made for: ``threads`` of a CPU, the folder of an engine's model by
    ``path``, and ``count(name, amount, **labels)`` for metrics of its own (None: nobody counts).
    """

    config: ServingConfig
    threads: int
    path: Callable[[EngineConfig], Path]
    count: Callable[..., None] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers, counted from 1, whose output drafts read. Raises ConfigError where
        two do not read the same ones.
        """
        found: dict[tuple[int, ...], str] = {}
        for draft in self.config.drafts:
            if draft.kind.reads_target:
                found.setdefault(read_config(self.path(draft)).layers, draft.name)
        if len(found) > 1:
            each = ", ".join(f"{name!r} {list(layers)}" for layers, name in found.items())
            raise ConfigError(f"drafts: all heads must read the same layers of the target: {each}")
        return next(iter(found), ())

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that step engines are made with."""
        limits, k_max = self.config.limits, self.config.policy.k_max
        return {
            "kv_blocks": limits.kv_cache_tokens // BLOCK_TOKENS,
            "max_context_tokens": limits.max_context_tokens,
            "max_draft_tokens": max(1, k_max),
        }


def make_engine(engine: EngineConfig, service: Service) -> Engine:
    """Load a target or a draft; its module is imported only now, for torch and others are heavy."""
    made: Engine = import_module(engine.kind.module).make(engine, service)
    return made
