"""How the engines of a deployment share the memory of their GPUs: a KV fraction for each, so that
the last one still finds its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.settings import ConfigError

RESERVE_BYTES = 2 << 30
"""Kept free on each GPU for the decoder's buffers and CUDA itself, per engine. An estimate: not
measured.
"""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One engine in the order of creation: its ``gpus``; its weights and activations, and bytes
    of KV a token, over all of them.
    """

    name: str
    gpus: Sequence[int]
    fixed_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class KVPlan:
    """``free_gpu_memory_fraction`` by engine, and how many tokens of KV each of them then holds."""

    fractions: dict[str, float]
    tokens: int


def plan_kv(
    engines: Sequence[EngineMemory], free_bytes: Mapping[int, int], kv_share: float
) -> KVPlan:
    """Divide the memory of the GPUs among engines that are created in this order.

    The executor takes its fraction of what is free *then*, after its own weights and activations.
    All engines get room for the same number of tokens, as many as the tightest GPU allows;
    ``kv_share`` of the room is used. Raises ConfigError where those alone do not fit.
    """
    tokens = (
        min(
            _tokens(engines, gpu, free_bytes[gpu])
            for gpu in {gpu for engine in engines for gpu in engine.gpus}
        )
        * kv_share
    )
    fractions = {}
    left = dict(free_bytes)
    for engine in engines:
        for gpu in engine.gpus:
            left[gpu] -= engine.fixed_bytes // len(engine.gpus)
        kv = tokens * engine.kv_bytes_per_token / len(engine.gpus)
        fractions[engine.name] = kv / min(left[gpu] for gpu in engine.gpus)
        for gpu in engine.gpus:
            left[gpu] -= int(kv)
    return KVPlan(fractions, int(tokens))


def _tokens(engines: Sequence[EngineMemory], gpu: int, free: int) -> float:
    """Return how many tokens of KV of all its engines fit a GPU besides their weights."""
    here = [engine for engine in engines if gpu in engine.gpus]
    fixed = sum(engine.fixed_bytes // len(engine.gpus) for engine in here)
    room = free - fixed - RESERVE_BYTES * len(here)
    if room <= 0:
        names = ", ".join(engine.name for engine in here)
        raise ConfigError(
            f"GPU {gpu} has {free >> 20} MiB free, and {names} need {fixed >> 20} MiB for "
            f"weights and activations and "
            f"{(RESERVE_BYTES * len(here)) >> 20} MiB besides KV"
        )
    return room / sum(engine.kv_bytes_per_token / len(engine.gpus) for engine in here)
