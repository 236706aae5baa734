"""The events of one traced request, noted where they happen; ``backend.ops.tracing`` makes spans
of it when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, NamedTuple, Protocol

from backend.ops.stats import Usage
from backend.sequence import Proposal


class RequestStep(Protocol):
    """A trace's record of a step that its request took part in."""

    started_s: float
    batch_size: int
    prefill_tokens: int
    parts_s: dict[str, float]


class Phase(NamedTuple):
    """A part of a request's life (``tokenise``, ``queue``, ``prefill``, ``decode``); it lasts until
    the next one starts.

    After a pre-emption they come again, from ``queue`` on.
    """

    name: str
    started_s: float


class TracedStep(NamedTuple):
    """A request's part in one step, in the phase of that index; ``parts_s`` are the whole step's
    times.
    """

    phase: int
    started_s: float
    ended_s: float
    draft: str
    length: int
    accepted: int
    emitted: int
    batch_size: int
    prefill_tokens: int
    parts_s: dict[str, float]


class ServedEnding(NamedTuple):
    """A request that was served."""

    reason: str
    usage: Usage


class ErrorEnding(NamedTuple):
    """A request that was not: an error's code. Its sentence may quote the prompt."""

    code: str


@dataclass(slots=True)
class RequestTrace:
    """``context`` is the caller's (W3C ``traceparent``), ``ending`` how the request ended.

    Times are ``perf_counter`` seconds; adding ``epoch_s`` makes them wall time.
    """

    context: dict[str, str]
    attributes: dict[str, Any] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=lambda: [Phase("tokenise", perf_counter())])
    steps: list[TracedStep] = field(default_factory=list)
    ending: ServedEnding | ErrorEnding | None = None
    ended_s: float = 0.0
    epoch_s: float = field(default_factory=lambda: time() - perf_counter())

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self.phases.append(Phase(phase, perf_counter()))

    def step(
        self, log: RequestStep, proposal: Proposal | None, accepted: int, emitted: int
    ) -> None:
        """Note this request's part in a step; the first token emitted ends a prefill."""
        now_s, phase = perf_counter(), len(self.phases) - 1
        draft, length = (proposal.draft, len(proposal.tokens)) if proposal else ("none", 0)
        batch = (log.batch_size, log.prefill_tokens, log.parts_s)
        self.steps.append(
            TracedStep(phase, log.started_s, now_s, draft, length, accepted, emitted, *batch)
        )
        if emitted and self.phases[phase].name == "prefill":
            self.phases.append(Phase("decode", now_s))

    def end(self, ending: ServedEnding | ErrorEnding) -> None:
        """Note how it ended."""
        self.ending, self.ended_s = ending, perf_counter()
