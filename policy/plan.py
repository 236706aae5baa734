"""What the policy sees, what it answers and what it is told afterwards: struct-of-arrays, one row per request.

``n`` rows are the requests of the in-flight batch, ``d`` columns the drafts in the order of ``View.drafts``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

NO_DRAFT = -1

_PER_ROW = ("request", "context", "remaining", "ceiling", "catchup", "ready", "control", "group")  # of a view


@dataclass(slots=True)
class View:
    """The in-flight batch before a step. Nobody changes a view or a plan; that they are not frozen saves up to 6 us to make one.

    ``request[n]`` stable ids; ``context[n]`` committed tokens; ``remaining[n]`` tokens the request may still emit (>= 1);
    ``ceiling[n, d]`` the most tokens draft d may propose for request i in this step (0 = cannot, or was not asked: ``needs_offers``);
    ``catchup[n, d]`` committed tokens that draft d has not seen yet;
    ``ready[n]`` whether it is to be planned for (else it is in flight);
    ``flying`` what was planned for the rows in flight, where they and the ready ones are in one in-flight batch (TensorRT-LLM's executor);
    None where they share no pass with them (cohorts) or nothing is in flight. ``prefill_tokens`` prompt tokens processed in the same step;
    ``prefilling`` requests admitted but still in prefill, those of this step's chunks included; ``queued`` requests waiting for admission.

    ``control[n]`` are the requests of a canary's other arm: where ``given`` is set, their choice is made there and not by the policy.
    ``cap_s`` is the longest step (seconds) that may be planned, unless one without speculation takes longer anyway.
    ``group[n]`` (None: none) names a source that requests share, -1 for none: requests of one source are expected to be alike.
    """

    drafts: tuple[str, ...]
    request: IntArray
    context: IntArray
    remaining: IntArray
    ceiling: IntArray
    catchup: IntArray
    ready: BoolArray
    prefill_tokens: int = 0
    queued: int = 0
    prefilling: int = 0
    control: BoolArray | None = None
    given: Plan | None = None
    cap_s: float = math.inf
    group: IntArray | None = None
    flying: Plan | None = None

    def __len__(self) -> int:
        return len(self.request)

    @property
    def decoding(self) -> int:
        """How many rows share the step: the ready ones and, in one in-flight batch with them, those in flight."""
        return len(self) if self.flying is not None else int(np.count_nonzero(self.ready))

    @property
    def share(self) -> float:
        """Which part of the rows that share the step is planned for."""
        return 1.0 if self.flying is None else np.count_nonzero(self.ready) / len(self)

    def of_rows(self, rows: IntArray) -> View:
        """Return the view of some of its rows."""
        columns: dict[str, Any] = {name: _taken(getattr(self, name), rows) for name in _PER_ROW}
        for name in ("given", "flying"):
            plan = getattr(self, name)
            columns[name] = None if plan is None else plan.of_rows(rows)
        return replace(self, **columns)

    def beside(self, flying: View, choices: Plan) -> View:
        """Return the view of these ready rows and, behind them, of those of another view that are in flight with these ``choices``."""
        ready = np.arange(len(self) + len(flying)) < len(self)
        pairs = {name: (getattr(self, name), getattr(flying, name)) for name in _PER_ROW}
        columns: dict[str, Any] = {
            name: None if one is None or other is None else np.concatenate([one, other]) for name, (one, other) in pairs.items()
        }
        draft, length = np.full(len(ready), NO_DRAFT), np.zeros(len(ready), np.int64)
        draft[~ready], length[~ready] = choices.draft, choices.length
        return replace(self, **columns | {"ready": ready, "flying": Plan(draft, length)})


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a plan asks beyond a proposal for each row, of engines that declare that they can
    (``policy.shapes``); None: not asked.

    ``cohort[n]`` the cohort of a row (-1: not ready). ``piece_tokens`` the length of the pieces that
    contexts are cut into.
    """

    cohort: IntArray | None = None
    piece_tokens: int | None = None

    def of_rows(self, rows: IntArray) -> TurnShape:
        """Return the shape of some of its rows."""
        return replace(self, cohort=_taken(self.cohort, rows))


@dataclass(slots=True)
class Drafted:
    """What the drafts propose for the rows of a plan: a tree of nodes for each row, best first.

    Of node q, ``row[q]`` (rising) is its row, ``draft[q]`` the column of the draft, ``confidence[q]``
    in [0, 1] how likely the draft holds the whole path to it (it never rises within a row),
    ``drawn[q]`` whether the row's tokens are sampled.
    """

    row: IntArray
    draft: IntArray
    confidence: FloatArray
    drawn: BoolArray


@dataclass(slots=True)
class Plan:
    """One choice per row of the view: ``draft[n]`` (column, ``NO_DRAFT`` for none) and ``length[n]`` (k; 0 = no speculation).

    ``predicted_s`` is the predicted step time (seconds), ``predicted_tokens`` the expected emitted tokens, ``price`` the price of
    time in tokens per second used; ``run[n]`` (None: as many as a turn may) what a row without a proposal runs freely in its turn;
    ``notes`` holds figures for traces (gain, reasons), never needed to execute the plan;
    ``shadow`` is what the planner would have done where something else is done. ``shape`` is None where every row has one chain;
    ``notes["why_not"]`` says for each shape why it was not used.
    """

    draft: IntArray
    length: IntArray
    predicted_s: float = 0.0
    predicted_tokens: float = 0.0
    price: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    shadow: Plan | None = None
    shape: TurnShape | None = None
    run: IntArray | None = None

    @classmethod
    def within(cls, view: View, draft: int | IntArray, length: int | IntArray) -> Plan:
        """Return the plan of these choices, one for all rows or int64[n], as far as a row allows.

        A length is cut to the row's ceiling; a row that is not ready, or is left without a
        token, gets no draft.
        """
        rows = np.arange(len(view))
        column: IntArray = np.broadcast_to(draft, len(view)).astype(np.int64)
        if not view.drafts:
            return cls(np.full(len(view), NO_DRAFT), np.zeros(len(view), np.int64))
        most = np.where(view.ready & (column >= 0), view.ceiling[rows, column], 0)
        cut: IntArray = np.minimum(np.maximum(length, 0), most).astype(np.int64)
        return cls(np.where(cut > 0, column, NO_DRAFT), cut)

    def of_rows(self, rows: IntArray) -> Plan:
        """Return the plan of some of its rows; what is predicted is their share of the whole."""
        share = len(rows) / max(len(self.length), 1)
        return replace(
            self,
            draft=self.draft[rows],
            length=self.length[rows],
            predicted_s=share * self.predicted_s,
            predicted_tokens=share * self.predicted_tokens,
            shadow=None if self.shadow is None else self.shadow.of_rows(rows),
            shape=None if self.shape is None else self.shape.of_rows(rows),
            run=_taken(self.run, rows),
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """What the times of a step on an asynchronous engine are of: not of its own rows, for answers come late and drafts are for others.

    ``tokens`` in all for ``rows`` with ``context_tokens`` were the batch of which ``parts_s["verify"]`` are so many ``iterations``, in one
    turn (0: they were not timed). ``request``, ``draft``, ``length`` int64[m] say for whom it was drafted.
    """

    request: IntArray
    draft: IntArray
    length: IntArray
    tokens: int = 0
    rows: int = 0
    context_tokens: int = 0
    iterations: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did, row by row of its plan's executed turns, and what was learnt for free.

    ``request, draft, length, accepted, emitted`` are int64[m]: ``length`` the longest path that the
    row's draft proposed, ``accepted`` how many emitted tokens are a path of its whole tree,
    ``scored`` to which position that is known (not behind an end of the text, nor behind a path
    that was not verified to its end). ``verified[m]`` nodes were verified, of which
    ``followed[m]`` were accepted (for metrics).
    ``node_*`` are the proposed nodes of which it was bound to be known whether their path is what
    the target drew, ``node_held`` bool[q]: behind the text or a node that was verified, for of
    others only failures are seen; ``node_draft``, ``node_confidence``, ``node_drawn`` [q] as in
    ``Drafted``.
    ``free_*`` (int64[f]) are counterfactual observations: draft ``free_draft`` would have had ``free_accepted`` of its first
    ``free_scored`` tokens accepted for ``free_request``. ``measured_s`` is the step's wall time; ``parts_s`` its parts by name
    (``verify``, ``draft:<name>``, ``overhead``); of cohorts each part's busy time.

    ``shape`` is the plan's as executed, for these rows.
    ``ran`` is what the times are of, where it is not these rows.
    """

    request: IntArray
    draft: IntArray
    length: IntArray
    accepted: IntArray
    emitted: IntArray
    scored: IntArray
    verified: IntArray
    measured_s: float
    parts_s: dict[str, float] = field(default_factory=dict)
    prefill_tokens: int = 0
    free_request: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    free_draft: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    free_accepted: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    free_scored: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    finished: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    shape: TurnShape | None = None
    ran: Ran | None = None
    followed: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    node_draft: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    node_confidence: FloatArray = field(default_factory=lambda: np.zeros(0))
    node_drawn: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    node_held: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))


class Policy(Protocol):
    """A planner: pure functions of (view, state, now, rng); the state is opaque to the caller and never mutated in place.

    A policy that inherits this needs ``plan`` alone; the rest here is right for one that learns
    and predicts nothing.
    """

    def start(self) -> Any:
        """Return the state before the first step."""
        return None

    @abstractmethod
    def plan(self, view: View, state: Any, now: float, rng: np.random.Generator) -> tuple[Plan, Any]:
        """Choose (draft, length) for every ready row; ``now`` in seconds of any monotonic clock."""
        ...

    def needs_offers(self, request: IntArray, state: Any) -> bool:
        """Return whether the next plan, if it is for these requests (int64[n]), may depend on what drafts could propose.

        Where it does not, the view's ``ceiling`` and ``catchup`` may be 0 for all but free drafts, whose proposals are evidence.
        """
        del request, state
        return True

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Any) -> IntArray:
        """Return how many of each row's nodes are verified, int64[n], the best first; view and plan are of these rows.

        Here as many as the plan has tokens for the row.
        """
        del view, drafted, state
        return plan.length

    def observe(self, outcome: Outcome, state: Any, now: float) -> Any:
        """Return the state after learning from a step; requests in ``outcome.finished`` are forgotten."""
        del outcome, now
        return state

    def stand_by(self, view: View, state: Any) -> Any:
        """Return the state before a step that is planned by someone else: ``observe`` learns from it what does not depend on that."""
        del view
        return state

    def save(self, state: Any, now: float) -> dict[str, Any]:
        """Return what of the state is worth keeping over a restart, JSON-able; empty for a policy that learns nothing."""
        del state, now
        return {}

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> Any:
        """Return the state of what was saved ``idle_s`` ago. Raises ValueError, naming field and value, for data that do not fit."""
        del data, now, idle_s
        return self.start()

    def drift(self, state: Any) -> dict[str, float]:
        """Return measured over predicted time by part of the step, for metrics; empty for a policy that predicts nothing."""
        del state
        return {}


def _taken(column: Any, rows: IntArray) -> Any:
    return None if column is None else column[rows]
