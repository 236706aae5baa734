"""The seam to engines that batch, schedule and sample by themselves (vLLM, TensorRT-LLM's LLM API).

A request is one asynchronous generation: the engine yields what is new, and closing the generation
aborts it. The loop around such an engine is ``backend.core.hosted``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.request import SamplingParams

if TYPE_CHECKING:
    from policy import Switches  # settings are read without it: its loops are compiled


@dataclass(frozen=True, slots=True)
class HostedRequest:
    """A generation in Spindle's words; an adapter translates it into those of its engine."""

    id: int
    tokens: tuple[int, ...]
    """The prompt, and what was generated of the text before (``resumed_tokens``)."""
    prompt_tokens: int
    """How many of ``tokens`` are the prompt."""
    max_tokens: int
    """Tokens that may still be emitted. Stop words are not the engine's: its generation is closed
    where one ends the text.
    """
    sampling: SamplingParams
    """Options. Those that the kind cannot mean are in its ``REFUSES``, or ``generate`` raises
    RequestError for them.
    """
    salt: str = ""
    """Only requests of one salt may share KV."""
    guide: tuple[str, str] | None = None
    """A grammar's kind (``backend.request.GUIDE_TYPES``) and text."""
    most_drafted: int | None = None
    """A ceiling on the speculation length; 0: none, None: the planner decides."""
    control: bool = False
    """It takes a canary's fixed choice."""
    trace: dict[str, str] | None = None
    """The caller's context (W3C ``traceparent``)."""


@dataclass(slots=True)
class NewTokens:
    """The new tokens of a generation."""

    tokens: list[int]
    log_probs: list[float] | None = None
    """Natural logarithms of each token's probability; None: not asked for."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely (token, log-probability) at each token's place, best first."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was found."""
    verified_steps: list[tuple[int, int]] = field(default_factory=list)
    """(proposed, accepted) of all steps that verified a proposal, where the engine reports them: in
    the last part.
    """


@dataclass(frozen=True, slots=True)
class HostedLimits:
    """The sizes of a hosted engine once it has started."""

    vocab_size: int
    max_context_tokens: int
    kv_tokens: int = 0
    """Tokens whose KV is kept; 0: unknown."""
    draft: str = ""
    """The name of its drafter; empty: nothing is proposed."""
    k_max: int = 0
    """The longest proposal, in tokens."""


class HostedEngine(Protocol):
    """An engine with a loop of its own. Everything but ``explain`` and ``learned_state`` runs in
    the event loop in which it was started.
    """

    name: str
    limits: HostedLimits

    def generate(self, ask: HostedRequest) -> AsyncGenerator[NewTokens, None]:
        """Yield a generation's parts until it has ended; closing it aborts it. Raises RequestError
        for what the engine cannot do, EngineLostError when it is gone.
        """
        ...

    def stepped_s(self) -> float:
        """Return when it last ended a step, in seconds of ``time.monotonic``."""
        ...

    def usage(self) -> dict[str, int]:
        """Return its KV blocks by state, as ``KVLedger.usage`` does; nothing where unknown."""
        ...

    def explain(self) -> dict[str, Any]:
        """Return the reply to the command ``explain`` (any thread)."""
        ...

    def learned_state(self) -> dict[str, Any]:
        """Return what its planner has learned (any thread); nothing where it has none."""
        ...

    async def close(self) -> None:
        """End its processes."""
        ...


class Meters(Protocol):
    """Takes metrics by the names of ``backend.ops.metric_names`` (any thread)."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        ...

    def observe(self, name: str, *values: float, **labels: str) -> None:
        """Record values of a histogram."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...


@dataclass(frozen=True, slots=True)
class HostedService:
    """The deployment that a hosted engine is started for."""

    config: ServingConfig
    path: Callable[[EngineConfig], Path]
    """Returns the folder of an engine's model."""
    meters: Meters
    switches: Callable[[], Switches]
    """Returns the operators' switches as they stand."""


class HostedModule(Protocol):
    """Functions of the module of a kind that is ``hosted``, besides ``check_folder`` of
    ``registry.KindModule``.
    """

    async def start(self, engine: EngineConfig, service: HostedService) -> HostedEngine:
        """Start the engine; heavy libraries are imported only now."""
        ...

    def drafter(self, engine: EngineConfig) -> tuple[str, int]:
        """Return name and longest proposal of the drafter that ``engine_args`` set up; an empty
        name where there is none. Raises ConfigError for arguments that follow from other settings.
        """
        ...
