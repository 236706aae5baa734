"""The interface of a policy: its view, its answer, and the outcome it learns from; one row for each
request.

``n`` are the rows of a view, the requests of the in-flight batch; ``d`` its drafts, columns in the
order of ``View.drafts``. Treat records as immutable. Not all are frozen: frozen dataclasses cost
microseconds per step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Record = TypeVar("Record")
State = TypeVar("State")
"""The state a policy keeps from one step to the next."""

NO_DRAFT = -1


def copier(kind: type[Record]) -> Callable[[Record], Record]:
    """Return what makes a shallow copy of a dataclass, in a fraction of the time of ``replace``."""
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    values = attrgetter(*names)
    return lambda record: kind(*values(record))


@dataclass(slots=True)
class View:
    """The batch of admitted requests before a step."""

    drafts: tuple[str, ...]
    request: IntArray
    """[n] unique ids."""
    context: IntArray
    """[n] committed tokens."""
    remaining: IntArray
    """[n] tokens that the request may still emit, at least 1."""
    ceiling: IntArray
    """[n, d] the most tokens that a draft may propose for a row. 0: none, or it was not asked (see
    ``Policy.needs_ceilings``).
    """
    catchup: IntArray
    """[n, d] the committed tokens of a row that a draft has not seen."""
    prefill_tokens: int = 0
    """Prompt tokens that share the step."""
    prefilling: int = 0
    """Requests in prefill."""
    control: BoolArray | None = None
    """[n] rows of a canary's other arm, which ``control_plan`` decides."""
    control_plan: Plan | None = None
    cap_s: float = math.inf
    """The longest step to be planned, unless one without speculation takes longer."""
    tenant: IntArray | None = None
    """[n] tenants: texts of one teach nothing about another's (``policy.tenants``); None: one for
    all.
    """
    sampled: BoolArray | None = None
    """[n] rows whose tokens are sampled; None: none are."""
    evidence: IntArray | None = None
    """[n, d] the bin of what each draft shows before it proposes (``policy.evidence``); None: no
    draft shows anything.
    """
    pass_tokens: int = 0
    """The tokens of the target's last pass."""
    change_tokens: int = 0
    """A pass of another number takes as much longer as this many more tokens do; 0: no longer."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(slots=True)
class Plan:
    """A choice for each row."""

    draft: IntArray
    """[n] a column of the view, or ``NO_DRAFT``."""
    length: IntArray
    """[n] the tokens to be proposed by it."""
    predicted_s: float = 0.0
    """Seconds of the step."""
    predicted_tokens: float = 0.0
    """Tokens emitted in it."""
    price: float = 0.0
    """The price of a second, in tokens, at which it was made; 0: none."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Figures and reasons for traces."""
    shadow: Plan | None = None
    """The policy's own choice where another one is executed."""
    nodes: int = 0
    """The nodes of the batch to be verified, by a target that chooses the likeliest itself; 0: as
    many as the lengths add up to.
    """

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """Return the plan of no speculation."""
        return cls(np.zeros(rows, np.int64) + NO_DRAFT, np.zeros(rows, np.int64))

    @classmethod
    def within(cls, view: View, draft: int | IntArray, length: int | IntArray) -> Plan:
        """Return the plan of these choices, one for all rows or int64[n], cut to the ceilings.

        A row that is left without a token gets no draft.
        """
        if not view.drafts:
            return cls.nothing(len(view))
        column: IntArray = np.broadcast_to(draft, len(view)).astype(np.int64)
        most = np.where(column >= 0, view.ceiling[np.arange(len(view)), column], 0)
        cut: IntArray = np.minimum(np.maximum(length, 0), most).astype(np.int64)
        return cls(np.where(cut > 0, column, NO_DRAFT), cut)


@dataclass(slots=True)
class DraftNodes:
    """The drafts' proposals for the rows of a plan: a tree of nodes for each row, best first."""

    row: IntArray
    """[q] the row of each node, rising."""
    draft: IntArray
    """[q] the column of its draft."""
    confidence: FloatArray
    """[q] how likely the draft holds the whole path to the node, 0 to 1; it never rises within a
    row.
    """
    sampled: BoolArray
    """[q] whether the row's tokens are sampled."""
    depth: IntArray | None = None
    """[q] the tokens before each on its path; None: the rows have chains."""


@dataclass(slots=True)
class StepRows:
    """The result of a step for each request that emitted tokens in it."""

    request: IntArray  # [m]
    draft: IntArray
    """[m] the column of the draft that proposed, ``NO_DRAFT``: none did."""
    length: IntArray
    """[m] the longest path of the proposal, in tokens."""
    accepted: IntArray
    """[m] how many of the emitted tokens follow a path of the proposal."""
    emitted: IntArray  # [m]
    scored: IntArray
    """[m] the position up to which it is known whether the proposal is right: no position after an
    end of the text is.
    """
    verified: IntArray
    """[m] the nodes that the target verified."""
    followed: IntArray
    """[m] the verified nodes that were accepted."""
    evidence: IntArray | None = None
    """[m] the evidence the draft showed before it proposed (``View.evidence``); None: nothing."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(slots=True)
class FreeChains:
    """The tokens of unchosen drafts that would have been accepted."""

    request: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [f]
    draft: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [f]
    accepted: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [f]
    scored: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[f] the first tokens of the chain, for which that is known."""
    evidence: IntArray | None = None
    """[f] the evidence the draft showed before it proposed (``View.evidence``); None: nothing."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(slots=True)
class StepNodes:
    """The nodes whose acceptance is known whatever the target drew.

    Their parent is the text, or was verified. (Only failures are ever seen of deeper nodes.)
    """

    row: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[q] the place in ``StepRows``."""
    confidence: FloatArray = field(default_factory=lambda: np.zeros(0))  # [q]
    sampled: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[q] whether the row's tokens are sampled."""
    accepted: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))  # [q]
    depth: IntArray | None = None
    """[q] the tokens before each on its path; None: the rows have chains, in order."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(slots=True)
class StepTimes:
    """How long a step took, in seconds of wall time."""

    measured_s: float
    parts_s: dict[str, float] = field(default_factory=dict)
    """Its parts: ``verify``, ``draft:<name>``, and ``overhead``, which includes ``planning`` and
    ``learning`` (from the step before).
    """


@dataclass(slots=True)
class Outcome:
    """The outcome of one step, for a policy to learn from."""

    rows: StepRows
    times: StepTimes
    free: FreeChains = field(default_factory=FreeChains)
    nodes: StepNodes = field(default_factory=StepNodes)
    prefill_tokens: int = 0
    pass_tokens: int = 0
    """The tokens that the target's pass had, with those that padded it; 0: as many as it needed."""
    finished: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[f] the requests that are over."""
    view: View | None = None
    """The batch that the step was planned for; None: it is not known."""
    plan: Plan | None = None
    """The plan that was carried out; None: it is not known."""


class Policy(Protocol[State]):
    """Pure functions of (view, state, now, rng). The state is never changed in place.

    A policy that inherits this needs ``plan`` alone: the other methods here fit one that learns and
    predicts nothing, and has None as its state. ``now`` is in seconds of any monotonic clock.
    """

    def start(self) -> State:
        """Return the state before the first step."""
        return cast("State", None)

    @abstractmethod
    def plan(
        self, view: View, state: State, now: float, rng: np.random.Generator
    ) -> tuple[Plan, State]:
        """Choose a draft and a length for every row."""
        ...

    def needs_ceilings(self, request: IntArray, state: State) -> bool:
        """Return whether the next plan may depend on what drafts could propose.

        If it does not for these requests int64[n], the view's ``ceiling`` and
        ``catchup`` may be 0 for all but free drafts: their proposals are evidence.
        """
        del request, state
        return True

    def trim(self, view: View, plan: Plan, drafted: DraftNodes, state: State) -> IntArray:
        """Return how many of each row's nodes are verified, int64[n], the best first.

        View and plan are of these rows. Here as many as the plan has tokens for the row.
        """
        del view, drafted, state
        return plan.length

    def observe(self, outcome: Outcome, state: State, now: float) -> State:
        """Return the state after learning from a step; finished requests are forgotten."""
        del outcome, now
        return state

    def save(self, state: State, now: float) -> dict[str, Any]:
        """Return what is worth keeping over a restart, JSON-able; empty: nothing."""
        del state, now
        return {}

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> State:
        """Return the state of what was saved ``idle_s`` ago.

        Raises ValueError, naming field and value, for data that do not fit.
        """
        del data, now, idle_s
        return self.start()

    def drift(self, state: State) -> dict[str, float]:
        """Return measured over predicted time by part of the step; empty: nothing is predicted."""
        del state
        return {}


AnyPolicy: TypeAlias = Policy[Any]
"""A policy for code that only hands its state on."""
