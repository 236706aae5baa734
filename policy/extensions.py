"""What the planner can be made with: how acceptance is learnt, how a step is priced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from .acceptance import Expected
from .latency import Predicted, Times
from .plan import FloatArray, IntArray, Outcome, View
from .problem import StepProblem


class Estimator(Protocol):
    """How acceptance is learnt: ``AcceptanceModel``, or another with a ``state`` of its own.

    Pure: every method returns a new state and changes none. What another estimator than
    ``AcceptanceModel`` has learnt is not kept over a restart.
    """

    def start(self) -> Any:
        """Return the state before any evidence."""

    def admit(
        self,
        state: Any,
        requests: list[int],
        group: list[int] | None = None,
        tenant: IntArray | None = None,
    ) -> Any:
        """Return the state with a place for each request; ``group`` of each, -1: none; ``tenant``
        row of each, None: the first.
        """

    def with_tenants(self, state: Any, tenants: int, emptied: list[int]) -> Any:
        """Return the state with so many rows of tenants; ``emptied`` ones are of new tenants."""

    def forget(self, state: Any, requests: Iterable[int]) -> Any:
        """Return the state without these requests; unknown ones do not matter."""

    def aged(self, state: Any, now: float) -> Any:
        """Return the state at a time, seconds of any monotonic clock."""

    def observe(
        self,
        state: Any,
        request: IntArray,
        draft: IntArray,
        accepted: IntArray,
        scored: IntArray,
        emitted: IntArray,
    ) -> Any:
        """Return the state after chains, with the arguments of ``AcceptanceModel.observe``."""

    def expected(self, state: Any, request: list[int]) -> Expected:
        """Return what is expected of admitted requests: hazards [k_max, drafts, n] in [0, 1]."""

    def doubt(self, state: Any, expected: Expected) -> tuple[FloatArray, FloatArray]:
        """Return the standard deviations of these hazards, float64[k_max, drafts, n], and the
        variance of a request's deviation from its draft's level, float64[drafts, n] squared logits.
        """


class Execution(Protocol):
    """How an engine executes a plan, where that is not one pass of the tokens of each row
    (``backend.hosts.padded``).
    """

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Put into the problem's seconds, in place, what does not depend on what is chosen."""

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds that a step should have taken as it was executed."""
