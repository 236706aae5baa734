"""One step's choice as numbers, and what a choice is worth (``policy.loops.problem``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .loops import problem as loops
from .loops.problem import StepProblem, ViewRows
from .plan import IntArray, View

_NONE = np.zeros(0, np.int64)


class Choice(NamedTuple):
    """A draft (column or NO_DRAFT) and a length for every row."""

    draft: IntArray  # [n]
    length: IntArray  # [n]


class Score(NamedTuple):
    """The worth of a choice."""

    value: float
    """Expected tokens."""
    charged_s: float
    """Seconds that the objective charges, catch-up spread over its horizon."""
    step_s: float
    """Seconds that the step itself takes."""

    def objective(self, price: float) -> float:
        """Return the priced objective, in tokens."""
        return self.value - price * self.charged_s


def ints(column: npt.NDArray[Any]) -> IntArray:
    """Return a column, [n] or of any shape, as the loops take it."""
    return np.ascontiguousarray(column, np.int64)


def evidence_of(view: View) -> IntArray:
    """Return the evidence of a view, int64[n, d], as the loops take it."""
    return np.zeros(view.ceiling.shape, np.int64) if view.evidence is None else ints(view.evidence)


def batch_of(view: View, rows: IntArray, slot: IntArray) -> ViewRows:
    """Return a view's columns as the loops take them; ``rows[n]`` in order, ``slot[n]`` by that
    order.
    """
    control_draft = control_length = _NONE
    if view.control_plan is not None and view.control is not None:
        control_draft = ints(view.control_plan.draft)
        control_length = ints(np.where(view.control, view.control_plan.length, -1))
    return ViewRows(
        rows,
        slot,
        ints(view.context),
        ints(view.remaining),
        ints(view.ceiling),
        ints(view.catchup),
        evidence_of(view),
        _NONE if view.sampled is None else ints(view.sampled),
        control_draft,
        control_length,
        int(view.prefill_tokens),
        int(view.prefilling),
        float(view.cap_s),
        int(view.pass_tokens),
        int(view.change_tokens),
    )


def score(problem: StepProblem, choice: Choice) -> Score:
    """Return exact tokens and seconds of a choice."""
    count = np.empty(problem.occupied.shape, np.int64)
    return Score(*loops.score(contiguous(problem), ints(choice.draft), ints(choice.length), count))


def contiguous(problem: StepProblem) -> StepProblem:
    """Return a problem as the loops take it."""
    integers = "ceiling", "first_tokens", "occupied"
    return StepProblem._make(
        np.ascontiguousarray(value, np.int64 if name in integers else np.float64)
        if isinstance(value, np.ndarray)
        else float(value)
        for name, value in problem._asdict().items()
    )
